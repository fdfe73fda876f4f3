"""The surface of a real runner: every pair measured, slots put back, kept for the next start."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decodegrid.configs.load import LoadedConfig, load_config
from decodegrid.engine import build
from decodegrid.engine.admission import EngineLimits, build_request
from decodegrid.engine.build import build_runner
from decodegrid.engine.cli import main
from decodegrid.engine.engine_loop import EngineLoop
from decodegrid.engine.runner import Runner
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.scheduler import Scheduler
from decodegrid.engine.stats import EngineStats
from decodegrid.engine.surface_run import SurfaceRun, make_policy, measure, obtain_surface
from decodegrid.engine.verify_policy import FixedVerify, ScheduledVerify, VerifyPolicy
from decodegrid.graphs.checkpoint import save_model


@pytest.fixture(scope="module")
def deployment(
    make_model: Callable[..., Any],
    make_raw: Callable[..., dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
    native_kernels: Path,
) -> LoadedConfig:
    """A small random model, traced and run by torch operators."""
    directory = tmp_path_factory.mktemp("deployment")
    changes = {"hc_sinkhorn_iters": 2}  # cheap to trace
    model = make_model(dtype=torch.float32, **changes)
    save_model(model, directory / "model", torch.float32, make_raw(**changes))
    (directory / "x.yaml").write_text(
        "model: {checkpoint: model, dtype: float64}\n"
        "scheduler: {max_num_reqs: 3, max_model_len: 64, prefill_chunk_sizes: [8]}\n"
        "cache: {block_size: 4}\n"
        "speculation: {num_draft_tokens: 2}\n"
        "compile: {backend: eager, cache_dir: cache, progress: false}\n"
        "surface: {repeats: 2}\n"
    )
    return load_config(directory / "x.yaml", [])


@pytest.fixture(scope="module")
def runner(deployment: LoadedConfig) -> Runner:
    return build_runner(deployment)


def test_a_pair_is_measured_with_all_its_query_tokens(runner: Runner) -> None:
    """The rows that are made up really use the pair: the split adds up to Q."""
    work = SurfaceRun(runner, 40)
    for key in runner.grid.keys:
        work.prepare(key)
        work.run(key)
        rows = runner.buffers.rows
        assert int(rows.query_lens[: key.num_reqs].sum()) == key.num_query_tokens
        assert bool((rows.num_emitted[: key.num_reqs] >= 1).all())
        lengths = runner.model.state.slots.seq_len[1 : key.num_reqs + 1]
        assert torch.equal(lengths, 40 + rows.num_emitted[: key.num_reqs])
    work.restore()


def test_slots_are_put_back(runner: Runner) -> None:
    slots = runner.model.state.slots
    before = {
        name: tensor.clone()
        for name, tensor in runner.model.state.tensors()
        if name.startswith("slots")
    }
    surface = measure(runner, 30, 1)
    assert set(surface.points) == set(runner.grid.keys)
    for name, tensor in before.items():
        assert torch.equal(getattr(slots, name.removeprefix("slots.")), tensor), name
    with pytest.raises(ValueError, match=r"62 tokens; allowed are 1\.\.61"):
        measure(runner, 62, 1)


def test_a_kept_surface_serves_later_starts(runner: Runner, deployment: LoadedConfig) -> None:
    first, note = obtain_surface(runner, deployment)
    assert note.startswith("measured at this start: no surface has been saved")
    assert first is not None and first.context_len == 61
    second, note = obtain_surface(runner, deployment)
    assert second == first and note.endswith("s ago")
    runner.facts["torch"] += "x"
    third, note = obtain_surface(runner, deployment)
    runner.facts["torch"] = runner.facts["torch"][:-1]
    assert third != first and "torch" in note


def test_policies(runner: Runner, deployment: LoadedConfig) -> None:
    scheduled = make_policy(runner, deployment)
    assert isinstance(scheduled, ScheduledVerify) and scheduled.budget.surface is not None
    for value, limit in (("all", None), ("5", 5)):
        override = [f"speculation.verify_tokens={value}"]
        policy = make_policy(runner, load_config(deployment.path, override))
        assert isinstance(policy, FixedVerify) and policy.limit == limit
    without = load_config(
        deployment.path, ["surface.repeats=0", "surface.max_age_s=0", "compile.cache_dir=none"]
    )
    policy = make_policy(runner, without)
    assert isinstance(policy, ScheduledVerify) and policy.budget.surface is None
    assert "everything is verified (surface.repeats is 0; no surface" in policy.status()[0]


def test_profile_prints_and_keeps(
    runner: Runner,
    deployment: LoadedConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "build_runner", lambda loaded: runner)
    arguments = ["profile", "--config", str(deployment.path), "--context-len", "9"]
    assert main([*arguments, "--repeats", "1", "--json", str(tmp_path / "s.json")]) == 0
    out = capsys.readouterr().out
    assert "context 9" in out and "kept as" in out
    data = json.loads((tmp_path / "s.json").read_text())
    (surface,) = data["surfaces"]
    assert surface["context_len"] == 9 and len(surface["pairs"]) == 9
    for wrong, message in (
        (["--repeats", "0"], "--repeats is 0"),
        (["--context-len", "0"], "--context-len is 0"),
    ):
        assert main([*arguments, *wrong]) == 2
        assert message in capsys.readouterr().err


def decode_all(
    runner: Runner, policy: VerifyPolicy, num_blocks: int, prompts: list[list[int]]
) -> EngineLoop:
    """Decode prompts with seeds 0, 1, ... at temperature 0.9 and filters; returns the loop."""
    limits = dataclasses.replace(EngineLimits.of(runner), num_blocks=num_blocks)
    loop = EngineLoop(runner, Scheduler(limits, policy=policy), EngineStats(runner))
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=0.9, top_p=0.95, top_k=40, max_tokens=24, ignore_eos=True
        )
        request = build_request(str(seed), prompt, params, seed=seed, eos_token_id=1, limits=limits)
        loop.add(request)
    return loop


def run(loop: EngineLoop) -> list[list[int]]:
    """Token ids of every request, prompt included."""
    requests = list(loop.scheduler.waiting)
    while loop.has_unfinished:
        loop.step()
    return [list(request.token_ids) for request in requests]


def test_the_loop_schedules_on_the_runner(runner: Runner, deployment: LoadedConfig) -> None:
    """Totals vary with the policy, rows wait and give way; what is emitted stays (float64)."""
    prompts = [[5, 6, 7], [9] * 11, [3, 4, 5, 6]]
    texts, totals = [], []
    for override in ("scheduled", "all", "3"):
        loaded = load_config(deployment.path, [f"speculation.verify_tokens={override}"])
        loop = decode_all(runner, make_policy(runner, loaded), runner.num_blocks, prompts)
        texts.append(run(loop))
        totals.append(loop.stats.num_query_tokens)
    assert texts[0] == texts[1] == texts[2]
    assert totals[2] < totals[1]
    # Blocks for less than two of the three: one gives way and is computed again.
    tight = decode_all(runner, make_policy(runner, deployment), 17, prompts)
    requests = list(tight.scheduler.waiting)
    assert run(tight) == texts[0]
    assert sum(request.num_preemptions for request in requests) > 0
    alone = [run(decode_all(runner, FixedVerify(), runner.num_blocks, prompts[:1]))[0]]
    assert alone == texts[0][:1]
