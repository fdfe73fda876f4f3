"""Seconds of single decode steps on slots whose state is put back before each step.

Owns the filling and rewinding of slots, the eager counterpart of a captured runner, and the cost
of dispatch. A sample is the median of a few steps in a row after one that is not counted, so that
each contender finds the caches as its own last step left them. Data flow: runner -> StepBench ->
seconds by name, one list for each contender.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from statistics import median

import torch
from torch import Tensor

from benchmarks.timing import interleave, time_call
from decodegrid.capture.backend import CapturedGraph
from decodegrid.capture.compile import RegionCompiler
from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.cpu import CpuBackend
from decodegrid.capture.grid import GraphKey
from decodegrid.capture.lowering import CompileOptions
from decodegrid.engine.runner import Runner
from decodegrid.engine.runner_protocol import SlotRequest
from decodegrid.engine.step_graphs import StepGraphs
from decodegrid.graphs.decode_step import decode_step
from decodegrid.graphs.regions import RegionTable, build_regions, plain_regions
from decodegrid.graphs.state import SlotState
from decodegrid.graphs.step_weights import store_matrices

STEPS_PER_SAMPLE = 3
EMPTY_CALLS = 128
"""Calls of the near-empty region in one captured program."""


@dataclass(frozen=True, slots=True)
class EagerGraph:
    """The step of one pair, run anew by torch operators at each replay."""

    key: GraphKey
    step: Callable[[], None]

    @property
    def num_nodes(self) -> int:
        """Nothing is captured."""
        return 0

    def replay(self) -> None:
        """Run the step."""
        with torch.no_grad():
            self.step()


def eager_regions(runner: Runner) -> RegionTable:
    """The regions uncompiled, plain functions instead of native ops."""
    model = runner.model
    return plain_regions(build_regions(model.config, model.state.capacity, as_ops=False))


def eager_runner(runner: Runner, keys: tuple[GraphKey, ...]) -> Runner:
    """A runner over the same state and buffers whose steps run eagerly.

    Its matrices have the model's dtype: torch has no product of float32 with bfloat16, and widening
    a matrix at each call would make the eager step look slow.
    """
    regions, buffers = eager_regions(runner), runner.buffers
    wide = store_matrices(runner.model.weights, runner.model.weights.embed.dtype)
    model = replace(runner.model, weights=wide)
    temperatures = torch.ones(max(runner.num_draft_tokens, 1))

    def make(key: GraphKey) -> Callable[[], None]:
        return lambda: decode_step(
            regions, model, buffers, temperatures, key.num_reqs, key.num_query_tokens
        )

    graphs: dict[GraphKey, CapturedGraph] = {key: EagerGraph(key, make(key)) for key in keys}
    return Runner(model, buffers, runner.grid, StepGraphs(graphs, {}), runner.counters)


class StepBench:
    """All slots of a runner filled with text of one length, and steps over the leading ones."""

    def __init__(self, runner: Runner, context: int, seed: int = 0) -> None:
        """Prefill every slot with `context` random tokens and let it draft once.

        Raises ValueError when the context and one step do not fit the deployment.
        """
        room = runner.num_draft_tokens + 1
        limit = runner.max_model_len - 2 * room
        num_blocks = -(-(context + 2 * room) // runner.block_size)
        if not 2 <= context <= limit or num_blocks * runner.max_num_reqs >= runner.num_blocks:
            raise ValueError(
                f"a context of {context} tokens does not fit {runner.max_num_reqs} slots of at "
                f"most {limit} tokens and {runner.num_blocks} blocks"
            )
        self.runner, self.context = runner, context
        rng = Random(seed)
        for slot in range(1, runner.max_num_reqs + 1):
            blocks = list(range(1 + (slot - 1) * num_blocks, 1 + slot * num_blocks))
            ids = [rng.randrange(runner.vocab_size) for _ in range(context)]
            _fill_slot(runner, slot, ids, blocks)
        self._slots = list(range(1, runner.max_num_reqs + 1))
        # One step without drafts leaves every slot one token longer and with K drafts.
        runner.decode(self._slots, len(self._slots))
        self._saved = {name: getattr(self._state, name).clone() for name in SlotState.__slots__}

    @property
    def _state(self) -> SlotState:
        return self.runner.model.state.slots

    def rewind(self) -> None:
        """Slot rows as they were after the filling; rings and pools need none of it."""
        for name, saved in self._saved.items():
            tensor: Tensor = getattr(self._state, name)
            tensor.copy_(saved)

    def seconds(self, runner: Runner, key: GraphKey) -> float:
        """One sample of the step of `key` by this runner or one that shares its tensors.

        Raises RuntimeError when the step did not run with exactly the key's sizes.
        """
        slots, total = self._slots[: key.num_reqs], key.num_query_tokens
        times = []
        for _ in range(STEPS_PER_SAMPLE + 1):
            self.rewind()
            times.append(time_call(lambda: runner.decode(slots, total)))
        self.rewind()
        result = runner.decode(slots, total)
        if result.key != key or result.num_query_tokens != total:
            raise RuntimeError(
                f"a step for {key} ran in {result.key} with {result.num_query_tokens} query tokens"
            )
        return median(times[1:])


def _fill_slot(runner: Runner, slot: int, ids: list[int], blocks: list[int]) -> None:
    """Prefill and start one slot."""
    chunk, padded = runner.prefill_chunk_sizes[-1], [-1, -1, -1, *ids]
    for begin in range(0, len(ids) - 1, chunk):
        part = ids[begin : min(begin + chunk, len(ids) - 1)]
        runner.prefill(slot, part, begin, _triple(padded, begin), blocks)
    most = len(ids) + 2 * (runner.num_draft_tokens + 1)
    request = SlotRequest(
        last_token=ids[-1],
        seq_len=len(ids),
        history=_triple(padded, len(ids) - 1),
        max_seq_len=most,
        temperature=0.7,
        seed=slot,
        stop_token_ids=(),
    )
    runner.start(slot, request, blocks)


def _triple(padded: list[int], position: int) -> tuple[int, int, int]:
    """The three ids before a position of a text that is led by three times -1."""
    one, two, three = padded[position : position + 3]
    return one, two, three


def compare_runners(
    bench: StepBench, runners: dict[str, Runner], key: GraphKey, repeats: int
) -> dict[str, list[float]]:
    """Samples of one pair by runners that share the bench's tensors, taking turns."""

    def make(runner: Runner) -> Callable[[], float]:
        return lambda: bench.seconds(runner, key)

    return interleave({name: make(runner) for name, runner in runners.items()}, repeats)


def count_region_calls(runner: Runner, key: GraphKey) -> tuple[int, float]:
    """(calls of regions and opaque ops in the step of `key`, mean number of tensors in each)."""
    sizes: list[int] = []

    def counted(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            sizes.append(_count_tensors(args))
            function(*args)

        return call

    plain = eager_regions(runner).calls
    table = RegionTable({name: counted(function) for name, function in plain.items()})
    with torch.no_grad():
        decode_step(
            table,
            runner.model,
            runner.buffers,
            torch.ones(max(runner.num_draft_tokens, 1)),
            key.num_reqs,
            key.num_query_tokens,
        )
    return len(sizes), sum(sizes) / len(sizes)


def _count_tensors(args: tuple[object, ...]) -> int:
    return sum(
        _count_tensors(tuple(item)) if isinstance(item, (list, tuple)) else isinstance(item, Tensor)
        for item in args
    )


def empty_region_seconds(options: CompileOptions, num_tensors: int, repeats: int) -> list[float]:
    """Seconds of one captured call of a region that adds `num_tensors` - 1 tensors of 2 numbers.

    A region that computes nothing cannot be compiled; this one costs dispatch and little else.
    """
    compiler = RegionCompiler(options, CaptureCounters())

    def nearly_empty(inputs: list[Tensor], total_out: Tensor) -> None:
        total = inputs[0]
        for item in inputs[1:]:
            total = total + item
        total_out.copy_(total)

    region = compiler.region(nearly_empty, {})
    inputs = [torch.zeros(2) for _ in range(max(num_tensors - 1, 1))]
    out = torch.zeros(2)

    def step() -> None:
        for _ in range(EMPTY_CALLS):
            region(inputs, out)

    graph = CpuBackend(compiler).capture("nearly empty", step)
    graph.replay()
    return [time_call(graph.replay) / EMPTY_CALLS for _ in range(repeats)]
