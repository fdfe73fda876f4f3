"""Files stay small enough to be read in one go."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("configs", "kernels", "graphs", "capture", "engine")
MAX_LINES = 350


def test_no_source_file_is_over_the_limit() -> None:
    lines = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    assert lines, "no source found"
    over = [f"{path}: {count}" for path, count in lines.items() if count > MAX_LINES]
    assert not over, f"over {MAX_LINES} lines: " + ", ".join(over)
