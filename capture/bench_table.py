"""Plain text tables: columns as wide as their cells, numbers at the right.

Owns the layout only.
"""

from collections.abc import Iterable, Sequence

_GAP = "  "


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]], num_names: int = 1) -> str:
    """Lines of a table without a line end after the last.

    head: a name for each column. num_names: leading columns that hold names and stand at the left.
    Raises ValueError for a row with more or fewer cells than the head.
    """
    lines = [list(head), *(list(row) for row in rows)]
    for line in lines:
        if len(line) != len(head):
            raise ValueError(f"a row has {len(line)} cells, the head has {len(head)}: {line}")
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        _GAP.join(
            cell.ljust(width) if column < num_names else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
