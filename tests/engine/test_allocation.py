"""Memory that is not there is refused with the settings that ask for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decodegrid.capture.grid import build_grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.phases import PhaseClock
from decodegrid.configs.load import load_config
from decodegrid.engine import build
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.engine.memory_errors import named_allocation, state_words
from decodegrid.graphs.state import Capacity


def test_a_pool_beyond_the_address_space(make_model: Callable[..., Any]) -> None:
    options = RunnerOptions(
        capacity=Capacity(3, 2**42, 8, 64, 2),
        grid=build_grid(2, 2, (2,)),
        prefill_chunk_sizes=(8,),
        dtype=torch.float64,
        device="cpu",
        compile_options=CompileOptions("none", None, 1),
        draft_temperatures=(1.0, 1.0),
        show_progress=False,
    )
    model = make_model(hc_sinkhorn_iters=2)
    with pytest.raises(ValueError) as caught:
        make_runner(model, options, PhaseClock())
    text = str(caught.value)
    assert "4398046511104 blocks (cache.num_blocks)" in text
    assert "scheduler.max_num_reqs = 2: " in text
    assert "can't allocate memory" in text and "\n" not in text


def test_a_device_without_memory_and_other_errors() -> None:
    with pytest.raises(ValueError) as caught, named_allocation("a pool"):
        raise torch.OutOfMemoryError("CUDA out of memory\nmore lines")
    assert str(caught.value) == "not enough memory for a pool: CUDA out of memory"
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), named_allocation("a pool"):
        raise RuntimeError("shapes differ")


def test_weights_that_memory_does_not_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(*args: Any, **options: Any) -> None:
        torch.empty(2**62, dtype=torch.uint8)

    monkeypatch.setattr(build, "load_model", load)
    loaded = load_config(None, [f"compile.cache_dir={tmp_path}", "model.dtype=float64"])
    with pytest.raises(ValueError) as caught:
        build.build_runner(loaded)
    wanted = f"not enough memory for the weights of {loaded.checkpoint_dir} (model.dtype = float64"
    assert str(caught.value).startswith(f"{wanted}, expanded): ")


@pytest.mark.parametrize(
    ("overrides", "blocks", "key"),
    [
        ((), 257, "scheduler.max_model_len = 2048"),
        (("cache.num_blocks=257",), 257, "cache.num_blocks"),
        (("cache.pool_bytes=1MB",), 27, "cache.pool_bytes"),
        (("cache.pool_bytes=1GB",), 257, "scheduler.max_model_len = 2048"),
        (("cache.memory_fraction=0.5",), 27, "cache.memory_fraction"),
    ],
)
def test_the_setting_that_sized_the_pool(overrides: tuple[str, ...], blocks: int, key: str) -> None:
    sizes = ("scheduler.max_num_reqs=8", "scheduler.max_model_len=2048", "cache.block_size=64")
    config = load_config(None, (*sizes, *overrides)).config
    capacity = Capacity(9, blocks, 64, 2048, 5)
    wanted = f"a pool of {blocks} blocks ({key}) and scheduler.max_num_reqs = 8"
    assert state_words(capacity, config) == wanted
    assert f"{blocks} blocks (cache.num_blocks)" in state_words(capacity, None)
