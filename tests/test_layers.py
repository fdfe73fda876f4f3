"""The dependency direction between the folders, read from the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "configs": set(),
    "kernels": set(),
    "graphs": {"configs", "kernels"},
    "capture": {"configs"},
    "engine": {"configs", "kernels", "graphs", "capture"},
}


def imported_folders(path: Path, text: str) -> set[str]:
    """Folders that a source imports, inside functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"{path}:{node.lineno}: relative import")
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            parts = name.split(".")
            if parts[0] in MAY_IMPORT:
                raise AssertionError(f"{path}:{node.lineno}: bare import of {parts[0]!r}")
            if parts[0] == "decodegrid" and len(parts) > 1 and parts[1] in MAY_IMPORT:
                found.add(parts[1])
    return found


def test_direction() -> None:
    bad = []
    for folder, allowed in MAY_IMPORT.items():
        for path in (ROOT / folder).rglob("*.py"):
            for other in imported_folders(path, path.read_text()) - {folder} - allowed:
                bad.append(f"{path.relative_to(ROOT)} imports {other}")
    assert not bad, "\n".join(bad)


def test_no_init_files() -> None:
    """A folder without __init__.py cannot hide an installed package of the same bare name."""
    assert not [p for f in (*MAY_IMPORT, "tests") for p in (ROOT / f).rglob("__init__.py")]


def test_environment_is_read_in_one_file() -> None:
    readers = set()
    for folder in MAY_IMPORT:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = set()
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os":
                    names = {node.attr}
                elif isinstance(node, ast.ImportFrom) and node.module == "os":
                    names = {alias.name for alias in node.names}
                if names & {"environ", "environb", "getenv", "putenv"}:
                    readers.add(str(path.relative_to(ROOT)))
    assert readers == {"configs/env.py"}


@pytest.mark.parametrize(
    ("text", "folders"),
    [
        ("import os\nfrom torch import nn", set()),
        ("def f():\n    from decodegrid.graphs.model import Model", {"graphs"}),
        ("if TYPE_CHECKING:\n    import decodegrid.engine.llm", {"engine"}),
        ("from decodegrid import capture", {"capture"}),
    ],
)
def test_reader_sees_every_form(text: str, folders: set[str]) -> None:
    assert imported_folders(Path("x.py"), text) == folders


@pytest.mark.parametrize("text", ["import kernels", "from graphs.a import M", "from . import x"])
def test_reader_refuses_bare_and_relative(text: str) -> None:
    with pytest.raises(AssertionError, match=r"x\.py:1: (bare|relative) import"):
        imported_folders(Path("x.py"), text)
