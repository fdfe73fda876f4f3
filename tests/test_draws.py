"""The property tests of the suite try the same examples in every run."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.internal.constants_ast import is_local_module_file


def draws() -> list[Any]:
    """What a property test is given."""
    found: list[Any] = []

    @settings(max_examples=40, derandomize=True)
    @given(st.lists(st.integers() | st.text() | st.floats(), max_size=40))
    def attempt(values: list[Any]) -> None:
        found.append(values)

    attempt()
    return found


def test_draws_do_not_depend_on_what_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hypothesis takes some of its values from the constants of imported modules."""
    before = draws()
    path = tmp_path / "imported.py"
    path.write_text("".join(f"x{i} = {10**9 + i}, 'word{i}', {i}.125\n" for i in range(100)))
    spec = importlib.util.spec_from_file_location("imported", path)
    assert spec is not None and spec.loader is not None and is_local_module_file(str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "imported", module)
    # As text: NaN is not equal to itself.
    assert len(before) == 40 and repr(draws()) == repr(before)
