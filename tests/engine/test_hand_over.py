"""A prompt computed in one engine and decoded in another: the same tokens as in a whole engine."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from decodegrid.capture.grid import build_grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.phases import PhaseClock
from decodegrid.engine.async_llm import AsyncLLM
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.engine.engine_types import EngineType
from decodegrid.engine.hand_over import HandOver, HandOverError, load_hand_over
from decodegrid.engine.llm import LLM
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.graphs.state import Capacity

PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def make_llm(
    make_model: Callable[..., Any],
    layer_changes: dict[int, dict[str, Any]],
    tokenizer: Tokenizer,
) -> Callable[..., LLM]:
    """make_llm(engine_type, block_size=8, seed=0, kv_cache="compute"): over a model of 4 layers."""
    made: dict[str, LLM] = {}

    def make(
        engine_type: EngineType, block_size: int = 8, seed: int = 0, kv_cache: Any = "compute"
    ) -> LLM:
        key = repr((engine_type, block_size, seed, kv_cache))
        if key not in made:
            sizes = {"hc_sinkhorn_iters": 2, "head_dim": 32, "index_head_dim": 32}
            changes = {**layer_changes[4], **sizes, "vocab_size": tokenizer.vocab_size}
            model = make_model(seed=seed, **changes)
            options = RunnerOptions(
                capacity=Capacity(4, 40, block_size, 64, 2, kv_cache=kv_cache),
                grid=build_grid(3, 2, (3,)),
                prefill_chunk_sizes=(8, 16),
                dtype=torch.float64,
                device="cpu",
                compile_options=CompileOptions("none", None, 1),
                draft_temperatures=(1.0, 1.0),
                show_progress=False,
            )
            runner = make_runner(model, options, PhaseClock())
            made[key] = LLM.from_runner(
                runner, tokenizer, engine_type=engine_type, async_scheduling=True
            )
        return made[key]

    return make


@pytest.fixture(scope="module")
def hand_over(make_llm: Callable[..., LLM]) -> HandOver:
    """Of a prompt with 24 computed tokens."""
    return make_llm("prompt").prefill([list(range(30, 55))])[0]


@pytest.mark.parametrize("kv_cache", ["compute", "v41"])
def test_outputs_are_those_of_a_whole_engine(
    make_llm: Callable[..., LLM], tmp_path: Path, kv_cache: str
) -> None:
    """Odd and even lengths, one token, windows shorter and longer; other block sizes; through a
    file; several completions; more requests than slots."""
    lengths = (1, 8, 9, 33)
    prompts = [list(range(20 + n, 20 + 2 * n)) for n in lengths]
    params = replace(PARAMS, n=2)
    want = make_llm("normal", kv_cache=kv_cache).generate(prompts, params)
    states = make_llm("prompt", kv_cache=kv_cache).prefill(prompts)
    for index, state in enumerate(states):
        state.save(tmp_path / str(index))
    loaded = [load_hand_over(tmp_path / str(index)) for index in range(len(states))]
    taker = make_llm("completion", block_size=16, kv_cache=kv_cache)
    got = taker.resume(loaded, params)
    assert [o.outputs for o in got] == [o.outputs for o in want]
    assert sum(o.num_verified for o in got) > 20
    assert taker.stats.num_prefill_steps == 0
    for llm in (taker, make_llm("prompt", kv_cache=kv_cache)):
        blocks, slots = llm.scheduler.blocks, llm.scheduler.slots
        assert (blocks.num_free, slots.num_free) == (blocks.num_usable, slots.num_usable)
        assert not llm.scheduler.has_unfinished


def test_a_state_is_as_large_as_its_prompt(hand_over: HandOver) -> None:
    sizes = {name: tuple(tensor.shape) for name, tensor in hand_over.tensors.items()}
    assert sizes["window.0"] == (8, 32) and sizes["window.4"] == (8, 32)
    assert sizes["keys.1"] == (12, 32) and sizes["index_keys.2"] == (24, 32)
    assert not any(name.startswith("open_pair") for name in sizes)
    numbers = 5 * 8 * 32 + 2 * (12 + 24) * 32
    assert hand_over.num_tokens == 24 and hand_over.num_bytes == 8 * numbers


def test_states_that_do_not_fit(make_llm: Callable[..., LLM], hand_over: HandOver) -> None:
    """Each is one error that names what differs; afterwards the engine serves."""
    taker = make_llm("completion", block_size=16)
    ids, tensors = hand_over.prompt_token_ids, hand_over.tensors
    missing = {name: tensor for name, tensor in tensors.items() if name != "keys.2"}
    bad: list[tuple[HandOver, str]] = [
        (replace(hand_over, prompt_token_ids=(*ids, 9)), r"keys\.1|index_keys\.2|open_pair"),
        (replace(hand_over, prompt_token_ids=ids[:-2]), r"keys\.1|index_keys|open_pair"),
        (replace(hand_over, prompt_token_ids=ids * 3), "of a prompt of 75 tokens.*1 to 64"),
        (replace(hand_over, prompt_token_ids=()), "of a prompt of 0 tokens"),
        (replace(hand_over, tensors=missing), r"the tensor keys\.2"),
        (
            replace(hand_over, tensors={**tensors, "keys.2": tensors["keys.2"].float()}),
            r"keys\.2 of a prompt .* must be torch.float64 \(24, 32\), got torch.float32",
        ),
    ]
    for state, message in bad:
        with pytest.raises(HandOverError, match=message):
            taker.resume([hand_over, state], PARAMS)
    with pytest.raises(HandOverError, match="the state is of model "):
        make_llm("completion", seed=1).resume([hand_over], PARAMS)
    with pytest.raises(
        HandOverError, match="the state is of kv_cache compute, this engine has v41"
    ):
        make_llm("completion", kv_cache="v41").resume([hand_over], PARAMS)
    with pytest.raises(RequestError, match="prompt_logprobs"):
        taker.resume([hand_over], replace(PARAMS, prompt_logprobs=0))
    want = make_llm("normal").generate([list(ids)], PARAMS)[0].outputs
    assert taker.resume([hand_over], PARAMS)[0].outputs == want


def test_files_that_are_none(hand_over: HandOver, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    hand_over.save(whole)
    (tmp_path / "cut").write_bytes(whole.read_bytes()[:-9])
    save_file(load_file(whole), tmp_path / "bare")
    save_file({}, tmp_path / "odd", {"decodegrid_hand_over": json.dumps({"format": 1})})
    for name in ("cut", "bare", "odd"):
        with pytest.raises(HandOverError, match=f"{name}: no hand-over file"):
            load_hand_over(tmp_path / name)
    with pytest.raises(OSError, match="absent"):
        load_hand_over(tmp_path / "absent")
    with pytest.raises(OSError, match="nowhere"):
        hand_over.save(tmp_path / "nowhere" / "file")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ("{bad", "not JSON at line 1, column 2"),
        ("9" * 5000, "thousands of digits"),
        ("[" * 100_000, "no hand-over file"),
        ('{"format": 1}', "no hand-over file of format 1"),
        (None, "the file is damaged"),
    ],
)
def test_damaged_files(
    hand_over: HandOver, tmp_path: Path, facts: str | None, message: str
) -> None:
    """Facts of any text; without one, each tensor in turn with a value that was not saved."""
    whole, path = tmp_path / "whole", tmp_path / "state"
    hand_over.save(whole)
    with safe_open(whole, framework="pt") as file:
        metadata, tensors = file.metadata(), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    cases = [(name, tensor) for name, tensor in tensors.items() if tensor.numel()]
    assert len(cases) > 5
    for name, tensor in cases if facts is None else cases[:1]:
        changed = tensor.clone()
        changed.view(-1)[0] += 1
        parts = {**tensors, name: changed if facts is None else tensor}
        save_file(parts, path, metadata if facts is None else {"decodegrid_hand_over": facts})
        with pytest.raises(HandOverError, match=message):
            load_hand_over(path)


def test_each_type_does_its_own_work_only(
    make_llm: Callable[..., LLM], hand_over: HandOver
) -> None:
    normal, prompt, completion = (make_llm(t) for t in ("normal", "prompt", "completion"))
    for llm, name in ((prompt, "prompt"), (completion, "completion")):
        with pytest.raises(RequestError, match=f"generate needs .* normal, this engine is {name}"):
            llm.generate("x")
        with pytest.raises(RequestError, match="stream needs"):
            llm.stream("x")
        with pytest.raises(RequestError, match="AsyncLLM needs"):
            AsyncLLM(llm)
    for llm in (normal, completion):
        with pytest.raises(RequestError, match=r"prefill\(\) needs scheduler.engine_type prompt"):
            llm.prefill("x")
    for llm in (normal, prompt):
        with pytest.raises(RequestError, match=r"resume\(\) needs .* completion"):
            llm.resume([hand_over])
