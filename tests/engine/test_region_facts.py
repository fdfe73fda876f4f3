"""What the key of generated code is made of: no file that decides about code may be missing."""

import ast
from pathlib import Path

from decodegrid.engine.region_facts import COMPILING_FILES, code_hash, source_files

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "decodegrid."


def imported_files(path: Path) -> set[Path]:
    """The project's files that a file imports, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            file = ROOT / f"{name.removeprefix(PACKAGE).replace('.', '/')}.py"
            if name.startswith(PACKAGE) and file.is_file():
                found.add(file)
    return found


def test_the_key_has_every_file_that_a_compiled_region_can_depend_on():
    """The imports of all that is hashed, followed to the end, lead to nothing that is not."""
    hashed = {path for path in source_files(ROOT) if path.suffix == ".py"}
    assert all(path.is_file() for path in hashed)
    reached = set(hashed)
    todo = list(hashed)
    while todo:
        new = imported_files(todo.pop()) - reached
        reached |= new
        todo += new
    outside = reached - hashed
    assert {path.relative_to(ROOT).parts[0] for path in outside} <= {"configs"}, outside


def test_every_hashed_source_changes_the_key_and_no_other_file_does(tmp_path):
    for path in source_files(ROOT):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (tmp_path / "capture" / "plan.py").write_text("# not compiled\n")
    before = code_hash(tmp_path)
    (tmp_path / "capture" / "plan.py").write_text("# changed\n")
    assert code_hash(tmp_path) == before
    for relative in ("capture/lowering.py", "kernels/csrc/noise.cpp", "graphs/regions_layer.py"):
        path = tmp_path / relative
        kept = path.read_bytes()
        path.write_bytes(kept + b"\n")
        assert code_hash(tmp_path) != before, relative
        path.write_bytes(kept)
    assert code_hash(tmp_path) == before
    assert "region_store.py" in COMPILING_FILES
