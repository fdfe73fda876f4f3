"""Overlapping steps of a real model: the same tokens, and no look at the device but collect()."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decodegrid.capture.grid import build_grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.phases import PhaseClock
from decodegrid.engine.build import RunnerOptions
from decodegrid.engine.build import make_runner as build_runner
from decodegrid.engine.llm import LLM
from decodegrid.engine.request_output import RequestOutput
from decodegrid.engine.runner import Runner
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.verify_policy import FixedVerify
from decodegrid.engine.window_snapshots import window_slack
from decodegrid.graphs.state import Capacity, VerifyMode

EOS = 1
BLOCK, DRAFTS, LENGTH = 4, 3, 64
MOST = 24
"""Output tokens of the texts that are known beforehand."""


@pytest.fixture(scope="module")
def make_device(
    make_model: Callable[..., Any], tokenizer: Tokenizer
) -> Callable[[VerifyMode], Runner]:
    """A runner over one model of two layers: 3 slots, a pool for less than two whole texts."""
    model = make_model(
        vocab_size=tokenizer.vocab_size,
        hc_sinkhorn_iters=1,
        num_hidden_layers=2,
        compress_ratios=[2, 1, 0],
        kv_source_layer_ids=[0, 1],
        index_source_layer_ids=[0, 1],
        candidate_source_layer_id=1,
        engram_layer_ids=[1],
        engram_num_embeddings=[184],
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=[1],
    )
    runners: dict[VerifyMode, Runner] = {}

    def make(verify: VerifyMode) -> Runner:
        if verify not in runners:
            slack = window_slack(BLOCK, DRAFTS)
            options = RunnerOptions(
                capacity=Capacity(
                    4, 13, BLOCK, LENGTH, DRAFTS, verify, window_slack=slack, rich=True
                ),
                grid=build_grid(3, DRAFTS, (3,)),
                prefill_chunk_sizes=(8,),
                dtype=torch.float64,
                device="cpu",
                compile_options=CompileOptions("none", None, 1),
                draft_temperatures=(1.0,) * DRAFTS,
                show_progress=False,
                num_snapshots=4,
            )
            runners[verify] = build_runner(model, options, PhaseClock())
        return runners[verify]

    return make


class Prompter:
    """Drafts of known texts in place of the model's, so that most of them are right."""

    def __init__(self, llm: LLM, texts: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        runner: Any = llm.stream_table.loop.runner
        self._scheduler, self._runner, self._texts = llm.scheduler, runner, texts
        self._num_launches = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        launch = self._runner.launch

        def launch_and_prompt(slots: Sequence[int], total: int) -> Any:
            step = launch(slots, total)
            self._write()
            return step

        self._runner.launch = launch_and_prompt
        try:
            yield
        finally:
            self._runner.launch = launch

    def _write(self) -> None:
        self._num_launches += 1
        slots = self._runner.model.state.slots
        for request in self._scheduler.running:
            text = self._texts[tuple(request.token_ids[: request.num_prompt_tokens])]
            done = int(slots.seq_len[request.slot]) - request.num_prompt_tokens
            drafts = list(text[done : done + DRAFTS])
            if drafts and (self._num_launches + request.order) % 3 == 0:
                drafts[-1] = (drafts[-1] + 1) % 256
            slots.drafts[request.slot, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)


def make_requests(
    draw: random.Random, known: list[RequestOutput], temperatures: list[float], *, is_new: bool
) -> list[tuple[SamplingParams, tuple[int, ...] | None]]:
    """Parameters and, where no stop string decides, the ids that the request has to emit."""
    made = []
    for index, (output, temperature) in enumerate(zip(known, temperatures, strict=True)):
        ids, text = output.outputs[0].token_ids, output.outputs[0].text
        options: dict[str, Any] = {"max_tokens": draw.randint(1 if is_new else MOST - 4, MOST)}
        kind = draw.choice(["length", "device", "host", "string"]) if is_new else "length"
        stops = {EOS}
        if kind in ("device", "host"):
            stops.add(draw.choice(ids))
            # The device knows the first eight, the end of text among them.
            others = [token for token in range(256) if token not in ids][: 20 * (kind == "host")]
            options["stop_token_ids"] = [*others, *stops]
        elif kind == "string" and len(text) > 4:
            start = draw.randrange(len(text) - 3)
            options["stop"] = [text[start : start + 2]]
        end = next((place + 1 for place, token in enumerate(ids) if token in stops), MOST)
        want = None if kind == "string" else ids[: min(options["max_tokens"], end)]
        params = SamplingParams(temperature=temperature, seed=index, **options)
        made.append((params, want))
    return made


def serve(
    runner: Runner,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    texts: dict[tuple[int, ...], tuple[int, ...]],
    params: list[SamplingParams],
    *,
    overlap: bool,
) -> tuple[LLM, list[RequestOutput]]:
    """All requests, some of low priority, some late, and one beside them that is aborted."""
    llm = LLM.from_runner(
        runner,
        tokenizer,
        policy=FixedVerify(9),
        async_scheduling=overlap,
        decode_steps_per_prefill_chunk=1,
    )
    table = llm.stream_table
    streams = [
        table.build(prompt, found, index=i, request_id=str(i), priority=i % 3)
        for i, (prompt, found) in enumerate(zip(prompts, params, strict=True))
    ]
    victim = table.build(prompts[0], SamplingParams(max_tokens=MOST, seed=0), request_id="gone")
    with Prompter(llm, texts).active():
        table.open([victim, *streams[:3]])
        for step in range(1000):
            if step == 7:
                table.open(streams[3:])
            if step == 11:
                table.abort("gone")
            table.step()
            if all(stream.is_finished for stream in streams):
                break
    outputs = [stream.output() for stream in streams]
    table.discard([victim, *streams])
    assert not table.has_unfinished
    scheduler = llm.scheduler
    assert scheduler.blocks.num_free == scheduler.blocks.num_usable
    assert scheduler.slots.num_free == scheduler.slots.num_usable
    return llm, outputs


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_on_equals_off(
    make_device: Callable[[VerifyMode], Runner], tokenizer: Tokenizer, verify: VerifyMode
) -> None:
    """Greedy with both ways to verify, sampled with coupled noise; ends of every kind."""
    runner = make_device(verify)
    draw = random.Random(3)
    prompts = [[draw.randint(20, 250) for _ in range(draw.randint(1, 14))] for _ in range(6)]
    temperatures = [0.9 if verify == "coupled" and i % 2 else 0.0 for i in range(6)]
    free = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=MOST, ignore_eos=True)
        for i, temperature in enumerate(temperatures)
    ]
    known = LLM.from_runner(runner, tokenizer).generate(prompts, free)
    texts = {output.prompt_token_ids: output.outputs[0].token_ids for output in known}
    num_late = num_accepted = num_preempted = 0
    for seed in range(2):
        made = make_requests(random.Random(seed), known, temperatures, is_new=seed > 0)
        params = [found for found, _ in made]
        _, off = serve(runner, tokenizer, prompts, texts, params, overlap=False)
        llm, on = serve(runner, tokenizer, prompts, texts, params, overlap=True)
        assert [output.outputs for output in on] == [output.outputs for output in off]
        for output, (_, want) in zip(on, made, strict=True):
            assert want is None or output.outputs[0].token_ids == want
        assert llm.stats.graph_seconds > 0, "the runner measures its graphs"
        num_late += llm.stats.num_late_rows
        num_accepted += sum(llm.stats.accepted_per_position)
        num_preempted += sum(output.num_preemptions for output in on)
    assert num_late and num_accepted and num_preempted


class HostReadError(AssertionError):
    """A device value was looked at."""


class NoReads(TorchDispatchMode):
    """Raises where a tensor is looked at: an operation's result that goes to the host, a shape that
    depends on values, memory. A kernel of this project is the device's own work."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._patch, self._in_kernel = patch, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "unique"):
            raise HostReadError(name)
        if name in ("index", "index_put_", "masked_select"):
            places = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
            if any(place is not None and place.dtype == torch.bool for place in places):
                raise HostReadError(f"{name} by truth")
        self._in_kernel = func.namespace == "decodegrid"
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._in_kernel = False

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._patch.context() as inside, self:
            for name in ("numpy", "tolist", "__array__", "data_ptr", "cpu"):
                inside.setattr(Tensor, name, self._refuse(getattr(Tensor, name)))
            yield

    def _refuse(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            if not self._in_kernel:
                raise HostReadError("memory")
            return method(*args, **kwargs)

        return read


def guarded_run(llm: LLM, patch: pytest.MonkeyPatch, params: SamplingParams) -> list[Any]:
    """Outputs of three prompts; nothing but collect() may look at the device."""
    runner: Any = llm.stream_table.loop.runner
    collect, guard = runner.collect, ExitStack()

    def collect_unguarded(step: Any) -> Any:
        guard.close()
        try:
            return collect(step)
        finally:
            guard.enter_context(NoReads(patch).active())

    table = llm.stream_table
    prompts = [[30, 40], [50], [60, 70, 80, 90]]
    streams = [table.build(prompt, params, index=i) for i, prompt in enumerate(prompts)]
    table.open(streams)
    patch.setattr(runner, "collect", collect_unguarded)
    with guard:
        guard.enter_context(NoReads(patch).active())
        while not all(stream.is_finished for stream in streams):
            table.step()
    patch.setattr(runner, "collect", collect)
    return [stream.output().outputs for stream in streams]


@pytest.mark.parametrize("options", [{}, {"logprobs": 2, "presence_penalty": 0.5}])
def test_nothing_is_read_from_the_device_before_collect(
    make_device: Callable[[VerifyMode], Runner],
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    runner = make_device("coupled")
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=14, **options)
    plain = LLM.from_runner(runner, tokenizer).generate([[30, 40], [50], [60, 70, 80, 90]], params)
    llm = LLM.from_runner(runner, tokenizer, async_scheduling=True)
    assert guarded_run(llm, monkeypatch, params) == [output.outputs for output in plain]


READS: dict[str, Callable[[Any], Any]] = {
    "int": lambda slots: int(slots.seq_len[1]),
    "bool": lambda slots: bool((slots.num_drafts > 0).any()),
    "tolist": lambda slots: slots.last_token.tolist(),
    "numpy": lambda slots: slots.drafts.numpy(),
    "index": lambda slots: slots.drafts[slots.num_drafts > 0],
    "cpu": lambda slots: slots.drafts.cpu(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_planted_read_is_caught(
    make_device: Callable[[VerifyMode], Runner],
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[[Any], Any],
) -> None:
    runner: Any = make_device("coupled")
    limit = runner._limit_drafts

    def look(slots: Sequence[int]) -> None:
        read(runner.model.state.slots)
        limit(slots)

    monkeypatch.setattr(runner, "_limit_drafts", look)
    llm = LLM.from_runner(runner, tokenizer, async_scheduling=True)
    with pytest.raises(HostReadError):
        guarded_run(llm, monkeypatch, SamplingParams(temperature=0, max_tokens=6))
    llm.stream_table.discard(list(llm.stream_table._open.values()))
