"""Every page does what it shows, and a page that shows something wrong is found out."""

import re
from typing import Any

import pytest

URL = "http://127.0.0.1:8000"


def test_a_page_does_what_it_shows(page: Any, run_of: Any) -> None:
    for block in page.blocks:
        try:
            run_of.run(block)
        except Exception as error:
            error.add_note(block.place)
            raise


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rm -rf build", "nothing checks the command rm"),
        ("make nonsense", "make nonsense"),
        (".venv/bin/decodegrid generate --nonsense x", "--nonsense"),
        (".venv/bin/python -m benchmarks.decode --nonsense", "2"),
        (".venv/bin/python -m nonsense.decode", "no module of the project"),
        (".venv/bin/python -m pip install -e '.[nonsense]'", "nonsense"),
        (f"curl -s {URL}/nothing", "404"),
        (f"# status 404\ncurl -s {URL}/ready", "200"),
        (f'curl -s {URL}/v1/completions -d \'{{"prompt": "a"}}\'', "415"),
        ("$ decodegrid --version\ndecodegrid 99", "not printed"),
        ("$ decodegrid doctor\nfine", "nothing checks its output"),
        ("decodegrid config check --config configs/nonsense.yaml", "nonsense.yaml"),
    ],
)
def test_wrong_lines_are_found(run_of: Any, page_run: Any, line: str, words: str) -> None:
    with pytest.raises((Exception, SystemExit), match=re.escape(words)):
        for command in page_run.read_commands(line):
            run_of.command(command)


def test_wrong_answers_are_found(page_run: Any) -> None:
    real = {"a": [{"b": 1, "c": None}], "d": "x"}
    page_run.check_shape({"a": [{"b": 2.5, "c": None}], "d": ""}, real, "page")
    for wrong in ({"a": [{"b": 1}], "d": "x"}, {"a": [], "d": "x"}, {"a": real["a"], "d": None}):
        assert page_run.shape_problem(wrong, real, "page")
