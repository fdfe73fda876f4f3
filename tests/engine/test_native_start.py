"""A build of the native kernels is said before it begins, and only then."""

from pathlib import Path

import pytest

from decodegrid.engine import native_start
from decodegrid.engine.native_start import start_native_kernels


@pytest.mark.parametrize("is_shown", [True, False])
@pytest.mark.parametrize("state", ["nothing", "built", "installed"])
def test_a_line_before_a_build(
    state: str,
    is_shown: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said: list[str] = []
    library = tmp_path / "kernels.so"
    monkeypatch.setattr(native_start, "library_path", lambda _: library)
    monkeypatch.setattr(native_start, "has_native_kernels", lambda: state == "installed")
    monkeypatch.setattr(
        native_start, "install_native_kernels", lambda _: said.append(capsys.readouterr().err)
    )
    if state == "built":
        library.touch()
    start_native_kernels(tmp_path, is_shown=is_shown)
    (before,) = said
    assert before.startswith("start-up: building the native kernels") == (
        is_shown and state == "nothing"
    )
    assert before == "" or (before.count("\n") == 1 and is_shown and state == "nothing")
