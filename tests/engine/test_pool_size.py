"""The size of the pool: by need, bytes, a share of the free memory; and what start-up says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decodegrid.capture.grid import build_grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.phases import PhaseClock
from decodegrid.configs.load import load_config
from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine import build
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.engine.cli import main
from decodegrid.engine.free_memory import free_host_bytes
from decodegrid.engine.llm import LLM
from decodegrid.engine.pool_size import (
    cache_line,
    max_concurrency,
    measure_free_bytes,
    resolve_num_blocks,
    size_pool,
)
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.state import Capacity

# 106 bytes a token in records; 3 sources of 64 and 32 channels, two of them at half the rate.
RECORD_BLOCK = 16 * 106
FLOAT_BLOCK = 16 * 4 * (64 + 32) * 2
SIZES = ("scheduler.max_num_reqs=4", "scheduler.max_model_len=100", "cache.block_size=16")
BY_NEED = 4 * 7 + 1


def deployment(*overrides: str) -> DeploymentConfig:
    return load_config(None, (*SIZES, *overrides)).config


def test_by_need_and_by_number(tiny_config: ModelConfig) -> None:
    assert resolve_num_blocks(deployment(), tiny_config, None) == BY_NEED
    for count in (2, 9, 500):
        config = deployment(f"cache.num_blocks={count}")
        assert resolve_num_blocks(config, tiny_config, 1) == count


@pytest.mark.parametrize("kv_cache", ["compute", "v41"])
@pytest.mark.parametrize("blocks", [2, 3, BY_NEED - 1, BY_NEED])
def test_bytes_hold_whole_blocks(tiny_config: ModelConfig, kv_cache: str, blocks: int) -> None:
    block = RECORD_BLOCK if kv_cache == "v41" else FLOAT_BLOCK
    for extra in (0, 1, block - 1):
        config = deployment(
            f"cache.kv_cache={kv_cache}", f"cache.pool_bytes={blocks * block + extra}"
        )
        assert resolve_num_blocks(config, tiny_config, None) == blocks
        assert size_pool(config, tiny_config, None).note == ""


def test_no_more_blocks_than_the_slots_can_use(tiny_config: ModelConfig) -> None:
    pool = size_pool(deployment("cache.pool_bytes=1MiB"), tiny_config, None)
    assert pool.num_blocks == BY_NEED
    room = 2**20 // FLOAT_BLOCK
    assert pool.note == (
        f"cache.pool_bytes = 1048576 has room for {room} blocks; scheduler.max_num_reqs = 4 "
        f"requests of scheduler.max_model_len = 100 tokens can use {BY_NEED}"
    )


def test_too_few_bytes(tiny_config: ModelConfig) -> None:
    config = deployment("cache.kv_cache=v41", f"cache.pool_bytes={2 * RECORD_BLOCK - 1}")
    with pytest.raises(ValueError) as caught:
        size_pool(config, tiny_config, None)
    assert str(caught.value) == (
        f"cache.pool_bytes = {2 * RECORD_BLOCK - 1} gives the pool {2 * RECORD_BLOCK - 1} bytes; a "
        f"block of 16 tokens takes {RECORD_BLOCK}, and the pool needs at least 2 of them (block 0 "
        "is the null block)"
    )
    config = deployment("cache.memory_fraction=0.5")
    with pytest.raises(ValueError, match=r"cache.memory_fraction = 0\.5 of 20000 free bytes gives"):
        size_pool(config, tiny_config, 20000)


def test_a_share_of_the_free_memory(tiny_config: ModelConfig) -> None:
    config = deployment("cache.memory_fraction=0.25", "cache.kv_cache=v41")
    for blocks, wanted in ((2, 2), (20, 20), (BY_NEED, BY_NEED), (BY_NEED + 9, BY_NEED)):
        free = 4 * (blocks * RECORD_BLOCK + RECORD_BLOCK // 2)
        assert resolve_num_blocks(config, tiny_config, free) == wanted
    # What is not measured yet is at most what can be used.
    assert resolve_num_blocks(config, tiny_config, None) == BY_NEED


def test_a_share_keeps_its_number_when_free_memory_varies(tiny_config: ModelConfig) -> None:
    config = load_config(
        None, ("cache.memory_fraction=0.5", "cache.block_size=16", "scheduler.max_num_reqs=64")
    ).config
    block = 16 * 4 * (64 + 32) * 2
    for exact in (33, 63, 700, 1000, 4095):
        found = resolve_num_blocks(config, tiny_config, 2 * exact * block)
        assert found <= exact < found * 17 / 16 + 1
        assert len(bin(found).rstrip("0")) - 2 <= 5
    near = {resolve_num_blocks(config, tiny_config, 2 * n * block) for n in range(992, 1023)}
    assert near == {992}


def test_free_memory_is_read_only_for_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    name = "decodegrid.engine.pool_size.free_bytes"
    monkeypatch.setattr(name, lambda device: asked.append(device) or 77)
    assert measure_free_bytes(deployment()) is None
    assert measure_free_bytes(deployment("cache.pool_bytes=1GiB")) is None
    assert asked == []
    assert measure_free_bytes(deployment("cache.memory_fraction=0.1")) == 77
    assert asked == ["cpu"]


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_free_host_memory(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, {"meminfo": "MemTotal: 90 kB\nMemFree: 1 kB\nMemAvailable:    50 kB\n"})
    assert free_host_bytes(proc, groups) == 51200  # no control groups at all

    write(proc, {"self/cgroup": "0::/outer/inner\n"})
    write(
        groups,
        {
            "outer/inner/memory.max": "max\n",
            "outer/inner/memory.current": "10\n",
            "outer/memory.max": "40000\n",
            "outer/memory.current": "30000\n",
            "outer/memory.stat": "anon 5\ninactive_file 7000\n",
        },
    )
    assert free_host_bytes(proc, groups) == 17000
    write(groups, {"outer/inner/memory.max": "5000\n", "outer/inner/memory.current": "9000\n"})
    assert free_host_bytes(proc, groups) == 0

    # Version 1; inside a container the own group is not visible, its limit stands at the root.
    write(proc, {"self/cgroup": "5:cpu:/a\n4:hugetlb,memory:/pod/box\n"})
    write(
        groups,
        {
            "memory/memory.limit_in_bytes": "30000\n",
            "memory/memory.usage_in_bytes": "9000\n",
            "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
        },
    )
    assert free_host_bytes(proc, groups) == 21500
    write(groups, {"memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert free_host_bytes(proc, groups) == 51200


def test_free_memory_that_the_system_does_not_tell(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"meminfo: cannot be read .*free memory is unknown"):
        free_host_bytes(tmp_path, tmp_path)
    write(tmp_path, {"meminfo": "MemTotal: 90 kB\n"})
    with pytest.raises(ValueError, match="no MemAvailable line; free memory is unknown"):
        free_host_bytes(tmp_path, tmp_path)


def test_this_machine_has_memory() -> None:
    assert free_host_bytes() > 2**20


def test_the_line_of_the_start_up_report(tiny_config: ModelConfig) -> None:
    capacity = Capacity(9, 513, 64, 4096, 5, kv_cache="v41")
    # 15 windows of 22 records, 2 rings of 7 pairs of 64 channels; 6 facts of 8 bytes, 3 floats,
    # 3 ids of history, 5 drafts and confidences, 8 stop ids, 64 blocks.
    request = 15 * 22 * 66 + 2 * 7 * 2 * 64 * 4
    request += 6 * 8 + 3 * 4 + 3 * 8 + 5 * 12 + 8 * 8 + 64 * 8
    assert cache_line(tiny_config, capacity, torch.float32) == (
        f"cache: 513 blocks of 64 tokens, {513 * 64 * 106 / 2**20:.1f} MiB (v41: 106 bytes a "
        f"token, {request:,} a request); max concurrency at 4096 tokens: 8.0"
    )


@pytest.mark.parametrize(
    ("num_blocks", "wanted"), [(2, 1 / 7), (8, 1.0), (12, 11 / 7), (29, 4.0), (90, 4.0)]
)
def test_concurrency_is_bounded_by_blocks_and_slots(num_blocks: int, wanted: float) -> None:
    assert max_concurrency(Capacity(5, num_blocks, 16, 100, 0)) == pytest.approx(wanted)


def options_of(config: DeploymentConfig | None) -> RunnerOptions:
    return RunnerOptions(
        capacity=Capacity(3, 11, 8, 40, 0),
        grid=build_grid(2, 0, (2,)),
        prefill_chunk_sizes=(8,),
        dtype=torch.float32,
        device="cpu",
        compile_options=CompileOptions("none", None, 1),
        draft_temperatures=(1.0,),
        show_progress=False,
        deployment=config,
    )


def test_the_runner_gets_the_pool_and_the_report_says_so(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(dtype=torch.float32, hc_sinkhorn_iters=2)
    # Layers 1 and 3 at half the rate, 4 at the full one; 16 + 16 channels of 4 bytes.
    block = 8 * 2 * 32 * 4
    own = ("scheduler.max_num_reqs=2", "scheduler.max_model_len=40", "cache.block_size=8")
    config = load_config(None, (*own, f"cache.pool_bytes={7 * block}")).config
    runner = make_runner(model, options_of(config), PhaseClock())
    assert runner.num_blocks == 7
    assert runner.model.state.pools[4].keys.shape == (7 * 8, 16)
    assert "\ncache: 7 blocks of 8 tokens, " in runner.start_up_report
    assert "max concurrency at 40 tokens: 1.2\n" in runner.start_up_report

    monkeypatch.setattr("decodegrid.engine.pool_size.free_bytes", lambda device: 16 * block)
    config = load_config(None, (*own, "cache.memory_fraction=0.25")).config
    assert make_runner(model, options_of(config), PhaseClock()).num_blocks == 4
    config = load_config(None, (*own, "cache.memory_fraction=0.95")).config
    runner = make_runner(model, options_of(config), PhaseClock())
    assert runner.num_blocks == 11 and "has room for 15 blocks" in runner.start_up_report
    assert make_runner(model, options_of(None), PhaseClock()).num_blocks == 11


def test_config_check_refuses_a_pool_that_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("start-up went on to allocate")

    monkeypatch.setattr(build, "make_runner", never)
    monkeypatch.setattr("decodegrid.engine.pool_size.free_bytes", never)
    own = [f"compile.cache_dir={tmp_path}", "cache.pool_bytes=1000"]
    assert main(["config", "check", *(f"--set={text}" for text in own)]) == 2
    error = capsys.readouterr().err
    assert "cache.pool_bytes = 1000 gives the pool 1000 bytes; a block of 64 tokens" in error
    with pytest.raises(ValueError) as caught:
        LLM(load_config(None, own))
    assert error == f"decodegrid: error: {caught.value}\n"
    share = [f"compile.cache_dir={tmp_path}", "cache.memory_fraction=0.01"]
    assert main(["config", "check", *(f"--set={text}" for text in share)]) == 0


def test_a_prompt_that_a_pool_of_bytes_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    def never(loaded: Any) -> LLM:
        raise AssertionError("the engine was started")

    # Two of a handful of blocks: the embedded model's block of 8 tokens takes under 10 kB.
    own = ("scheduler.max_model_len=400", "cache.block_size=8", "cache.pool_bytes=20000")
    argv = ["generate", "x" * 300, "--max-tokens", "60", *(f"--set={text}" for text in own)]
    assert main(argv, never) == 2
    assert "cache blocks of 8 tokens; the pool has" in capsys.readouterr().err
