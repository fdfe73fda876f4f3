"""The error of fields that do not fit together, raised by sections and by the whole deployment.

Owns what it holds; configs/load.py adds file and line.
"""


class CrossFieldError(ValueError):
    """Fields that are legal alone and contradict each other.

    `problems` holds (dotted key of the field to change, below what was being checked, message)
    pairs; the messages name every field that takes part, and its value.
    """

    def __init__(self, problems: tuple[tuple[str, str], ...]) -> None:
        super().__init__("; ".join(f"{key}: {message}" for key, message in problems))
        self.problems = problems
