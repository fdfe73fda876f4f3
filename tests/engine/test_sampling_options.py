"""The way of a request's filters from the caller, or the command line, to the slot row."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from decodegrid.configs.load import LoadedConfig, load_config
from decodegrid.configs.sections import SpeculationSection
from decodegrid.engine import build
from decodegrid.engine.cli_options import add_sampling_options, sampling_from_options
from decodegrid.engine.llm import LLM
from decodegrid.engine.runner_protocol import SlotRequest
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.graphs.model_config import Calibration, ModelConfig, parse_model_config


def test_filters_reach_the_slot(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> None:
    """Each request has its own, and keeps it when it is preempted and started again."""
    runner = make_runner(max_num_reqs=3, num_blocks=18, drafts=0)
    started: list[SlotRequest] = []
    start = runner.start

    def record(slot: int, request: SlotRequest, block_ids: list[int]) -> None:
        started.append(request)
        start(slot, request, block_ids)

    runner.start = record
    llm = LLM.from_runner(runner, tokenizer)
    wanted = [(0.5, 7), (1, -1), (0.25, 10**30)]
    params = [
        SamplingParams(top_p=top_p, top_k=top_k, max_tokens=40, seed=i, ignore_eos=True)
        for i, (top_p, top_k) in enumerate(wanted)
    ]
    outputs = llm.generate([[20, 21, 22 + i] for i in range(3)], params)
    assert sum(output.num_preemptions for output in outputs) > 0
    assert len(started) > 3
    assert {(r.seed, r.top_p, r.top_k) for r in started} == {
        (i, float(top_p), top_k) for i, (top_p, top_k) in enumerate(wanted)
    }


@pytest.mark.parametrize(
    ("flags", "top_p", "top_k"),
    [
        ([], 0.9, 40),
        (["--top-p", "0.5"], 0.5, 40),
        (["--top-k", "-1"], 0.9, -1),
        (["--top-p=1", "--top-k=3"], 1.0, 3),
    ],
)
def test_flags_win_over_the_deployment(flags: list[str], top_p: float, top_k: int) -> None:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)
    loaded = load_config(None, ["sampling.top_p=0.9", "sampling.top_k=40"])
    params = sampling_from_options(parser.parse_args(flags), loaded)
    assert (params.top_p, params.top_k) == (top_p, top_k)


@pytest.mark.parametrize(
    ("overrides", "verify", "temperatures"),
    [
        # The checkpoint's own, where the deployment has none.
        ([], "coupled", (1.25, 0.75, 0.5)),
        (["speculation.verify=rejection"], "rejection", (3.0, 1e-5, 1.0)),
        (["speculation.confidence_temperatures.coupled=[2, 3, 4]"], "coupled", (2.0, 3.0, 4.0)),
        (
            [
                "speculation.verify=rejection",
                "speculation.confidence_temperatures.coupled=[2, 3, 4]",
                "speculation.confidence_temperatures.rejection=[1e-9, 1, 1.5]",
            ],
            "rejection",
            (1e-5, 1.0, 1.5),
        ),
        (["speculation.num_draft_tokens=0", "speculation.verify=rejection"], "rejection", (1.0,)),
    ],
)
def test_the_deployment_reaches_the_build(
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    verify: str,
    temperatures: tuple[float, ...],
) -> None:
    made: list[build.RunnerOptions] = []
    check_settings = build.check_settings

    def calibrated(loaded: LoadedConfig) -> ModelConfig:
        kept = Calibration((1.25, 0.75, 0.5, 9.0, 9.0), (3.0, 1e-9, 1.0, 9.0, 9.0))
        return replace(check_settings(loaded), dspark_confidence_temperatures=kept)

    monkeypatch.setattr(build, "check_settings", calibrated)
    monkeypatch.setattr(build, "load_model", lambda *args, **options: None)
    monkeypatch.setattr(build, "make_runner", lambda model, options, clock: made.append(options))
    threads = torch.get_num_threads()
    build.build_runner(load_config(None, ["speculation.num_draft_tokens=3", *overrides]))
    torch.set_num_threads(threads)
    (options,) = made
    assert options.capacity.verify == verify
    assert options.draft_temperatures == temperatures


def test_a_checkpoint_that_nobody_calibrated(make_raw: Callable[..., dict[str, Any]]) -> None:
    model = parse_model_config(make_raw())
    assert model.dspark_confidence_temperatures is None
    empty = {"speculation": SpeculationSection(num_draft_tokens=3)}
    config = load_config(None, []).config.model_copy(update=empty)
    assert build.divisors_of(config, model) == (1.0, 1.0, 1.0)
    nothing = config.model_copy(update={"speculation": SpeculationSection(num_draft_tokens=0)})
    assert build.divisors_of(nothing, model) == (1.0,)
