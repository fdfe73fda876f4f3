"""What leaves for, and comes from, the process environment."""

import os
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from decodegrid.configs.env import set_inductor_cache_dir, set_tensor_pointer


def test_inductor_uses_the_directory_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "before"))
    set_inductor_cache_dir(tmp_path / "after")
    assert Path(cache_dir()) == tmp_path / "after"


def test_libraries_find_torchs_function_where_they_look(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
    monkeypatch.setenv(name, "0")
    set_tensor_pointer(12345)
    assert os.environ[name] == "12345"
