"""Cached runs next to the uncached forward: a runner, the texts it makes, and the comparison.

A `CachedRun` drives one runner as the engine does, remembers every text and the logits behind every
emitted token, and can force drafts, so that acceptance is under control. Texts are checked by one
uncached forward over the whole result (teacher forcing), not by one per step.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from decodegrid.capture.compile import RegionCompiler
from decodegrid.capture.grid import build_grid
from decodegrid.capture.lowering import Backend, CompileOptions
from decodegrid.capture.phases import PhaseClock
from decodegrid.engine import build
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.engine.runner import Runner
from decodegrid.engine.runner_protocol import SlotRequest, StepResult
from decodegrid.engine.window_snapshots import window_slack
from decodegrid.graphs.checkpoint import load_model
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.kv_cache import KvCache
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.regions import RegionTable, build_regions
from decodegrid.graphs.state import BoundedReplay, Capacity, VerifyMode

BLOCK_SIZE = 8
MAX_MODEL_LEN = 128
BLOCKS_PER_SLOT = MAX_MODEL_LEN // BLOCK_SIZE

RECORD_REGIONS = ("attn_in", "source_two", "index_in", "attend_both", "copy_window")
"""Regions that write or read rings and pools, one of each kind."""


@dataclass
class CachedRun:
    """One runner, its live texts and the oracle."""

    model: DraftModel
    runner: Runner
    oracle: DraftModel
    """float64 model that the texts are compared with."""
    texts: dict[int, list[int]] = field(default_factory=dict)
    prompt_lens: dict[int, int] = field(default_factory=dict)
    logits: dict[int, list[Tensor]] = field(default_factory=dict)
    """By slot, one row for every emitted token."""
    blocks: dict[int, list[int]] = field(default_factory=dict)
    """Block table by slot; chosen at the first prefill unless a test did."""
    verified: int = 0
    accepted: int = 0
    regions: RegionTable | None = None
    """Of a compiled run: its regions, to call outside of a graph."""

    def reset(self) -> None:
        """Fill state and buffers with what an earlier request could have left: finite rubbish."""
        generator = torch.Generator().manual_seed(1)
        for name, tensor in self.runner.model.state.tensors():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
            elif name != "slots.block_table":
                tensor.copy_(torch.randint(0, 50, tensor.shape, generator=generator))
        self.texts, self.prompt_lens, self.logits, self.blocks = {}, {}, {}, {}
        self.verified = self.accepted = 0

    def history(self, text: Sequence[int], position: int) -> tuple[int, int, int]:
        """The three ids before a position."""
        a, b, c = (text[p] if p >= 0 else -1 for p in range(position - 3, position))
        return a, b, c

    def prefill(
        self, slot: int, prompt: Sequence[int], sizes: Iterable[int] = ()
    ) -> Iterator[None]:
        """Prefill all but the last token in chunks of `sizes` (then 16 each), one per `next`."""
        if slot not in self.blocks:
            order = list(range(1 + (slot - 1) * BLOCKS_PER_SLOT, 1 + slot * BLOCKS_PER_SLOT))
            random.Random(slot).shuffle(order)
            self.blocks[slot] = order
        rest, start, last = iter(sizes), 0, len(prompt) - 1
        while start < last:
            end = min(start + next(rest, 16), last)
            before = self.history(prompt, start)
            self.runner.prefill(slot, prompt[start:end], start, before, self.blocks[slot])
            start = end
            yield

    def start(
        self,
        slot: int,
        prompt: Sequence[int],
        *,
        temperature: float = 0.0,
        seed: int = 0,
        asked: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Write the slot row of a prefilled prompt; `asked`: more fields of the request."""
        request = SlotRequest(
            last_token=prompt[-1],
            seq_len=len(prompt),
            history=self.history(prompt, len(prompt) - 1),
            max_seq_len=MAX_MODEL_LEN,
            temperature=temperature,
            seed=seed,
            stop_token_ids=(),
            **asked,
        )
        self.runner.start(slot, request, self.blocks[slot])
        self.texts[slot], self.prompt_lens[slot] = list(prompt), len(prompt)
        self.logits[slot] = []

    def begin(
        self,
        slot: int,
        prompt: Sequence[int],
        sizes: Iterable[int] = (),
        *,
        temperature: float = 0.0,
        seed: int = 0,
        asked: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Prefill and start a slot."""
        for _ in self.prefill(slot, prompt, sizes):
            pass
        self.start(slot, prompt, temperature=temperature, seed=seed, asked=asked)

    def decode(
        self, slots: Sequence[int], total: int, masks: NDArray[np.int32] | None = None
    ) -> StepResult:
        """One step, with masks in two halves; appends what it emits to texts and logits."""
        if masks is None:
            result = self.runner.decode(slots, total)
        else:
            step = self.runner.launch_forward(slots, total)
            self.runner.launch_choice(step, masks)
            result = self.runner.collect(step)
        buffers = self.runner.buffers
        for row, slot in enumerate(slots):
            count = int(result.num_emitted[row])
            start = int(buffers.rows.query_starts[row])
            self.texts[slot] += result.token_ids[row, :count].tolist()
            self.logits[slot] += list(buffers.output.logits[start : start + count].clone())
            self.verified += int(result.num_verified[row])
            self.accepted += count - 1
        return result

    def force_drafts(self, slot: int, drafts: Sequence[int]) -> None:
        """Replace the drafts that the drafter left; a slot that has none stays without."""
        row = self.runner.model.state.slots.drafts[slot]
        row[: len(drafts)] = torch.tensor(drafts, dtype=torch.int64)

    def emitted(self, slot: int) -> list[int]:
        """Tokens after the prompt."""
        return self.texts[slot][self.prompt_lens[slot] :]

    def snapshot(self) -> "Snapshot":
        """A copy of all state and of the texts."""
        state = self.runner.model.state
        return Snapshot(
            {name: tensor.clone() for name, tensor in state.tensors()},
            {slot: list(text) for slot, text in self.texts.items()},
            {slot: list(rows) for slot, rows in self.logits.items()},
        )

    def restore(self, snapshot: "Snapshot") -> None:
        """Back to a snapshot of the same requests."""
        for name, tensor in self.runner.model.state.tensors():
            tensor.copy_(snapshot.tensors[name])
        self.texts = {slot: list(text) for slot, text in snapshot.texts.items()}
        self.logits = {slot: list(rows) for slot, rows in snapshot.logits.items()}

    def reference_logits(self, slot: int) -> Tensor:
        """Uncached logits behind every emitted token of a slot, (emitted, vocab) float64."""
        text = self.texts[slot]
        kv_cache = self.runner.model.state.capacity.kv_cache
        logits = self.oracle.logits(torch.tensor(text), kv_cache)
        return logits[self.prompt_lens[slot] - 1 : len(text) - 1]

    def worst_difference(self) -> float:
        """Largest difference of a logit to the uncached forward, over everything emitted."""
        worst = 0.0
        for slot, rows in self.logits.items():
            if rows:
                difference = torch.stack(rows).double() - self.reference_logits(slot)
                worst = max(worst, float(difference.abs().max()))
        return worst

    def check_greedy(self) -> None:
        """Everything emitted is the uncached forward's own choice; logits within 1e-9."""
        for slot in self.texts:
            assert self.emitted(slot) == self.reference_logits(slot).argmax(-1).tolist()
        assert self.worst_difference() < 1e-9

    def readable(self, slot: int) -> dict[str, Tensor]:
        """All state of a slot that a later step may read before it is rewritten.

        Rings by position, oldest first; pool entries by entry; the slot's own row whole.
        """
        state, config = self.runner.model.state, self.runner.model.config
        ahead = int(state.slots.seq_len[slot]) - 1
        found = {}
        for name, tensor in state.tensors():
            if name.startswith(("slots.", "rich.")):
                found[name] = tensor[slot].clone()
        positions = torch.arange(max(0, ahead - config.sliding_window + 1), ahead)
        for layer, ring in enumerate(state.window_rings):
            rows = slot * state.ring_len + positions % state.ring_len
            found[f"window.{layer}"] = ring[rows].clone()
        table = state.slots.block_table[slot]
        for layer, pool in state.pools.items():
            ratio = config.compress_ratios[layer]
            per_block = BLOCK_SIZE // ratio
            entry = torch.arange(ahead // ratio)
            rows = table[entry // per_block] * per_block + entry % per_block
            found[f"keys.{layer}"] = pool.keys[rows].clone()
            found[f"index_keys.{layer}"] = pool.index_keys[rows].clone()
            if ahead % ratio:
                spot = slot * state.compressor_len + (ahead - 1) % state.compressor_len
                found[f"open_pair.{layer}"] = pool.compressor[spot].clone()
        return found

    def assert_equal(self, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
        """Two results of `readable` agree in every bit, drafts and confidences included."""
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), name

    def assert_close(self, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
        """Integers equal, floats within 1e-10; blocks may differ, drafts count if there are any."""
        assert got.keys() == want.keys()
        drafts = int(want["slots.num_drafts"])
        for name, tensor in want.items():
            other = got[name]
            if name in ("slots.drafts", "slots.confidence"):
                tensor, other = tensor[:drafts], other[:drafts]
            if name != "slots.block_table":
                torch.testing.assert_close(other, tensor, rtol=0, atol=1e-10, msg=name)


@dataclass
class Snapshot:
    """State and texts at one moment."""

    tensors: dict[str, Tensor]
    texts: dict[int, list[int]]
    logits: dict[int, list[Tensor]]


def build_run(
    model: DraftModel,
    num_drafts: int,
    max_num_reqs: int,
    req_sizes: Sequence[int],
    draft_temperatures: tuple[float, ...] = (),
    verify: VerifyMode = "coupled",
    backend: Backend = "none",
    cache_dir: Path | None = None,
    spare_blocks: int = 3,
    kv_cache: KvCache = "compute",
    num_snapshots: int = 0,
    rich: bool = False,
    bounded: tuple[BoundedReplay, int] = ("off", 0),
) -> CachedRun:
    """A runner in the model's own dtype, captured prefill sizes 4 and 16."""
    dtype = model.embed.weight.dtype
    num_blocks = max_num_reqs * BLOCKS_PER_SLOT + spare_blocks
    sizes = (max_num_reqs + 1, num_blocks, BLOCK_SIZE, MAX_MODEL_LEN, num_drafts)
    slack = window_slack(BLOCK_SIZE, num_drafts) if num_snapshots else 0
    capacity = Capacity(*sizes, verify, kv_cache, slack, rich, *bounded)
    options = RunnerOptions(
        capacity=capacity,
        grid=build_grid(max_num_reqs, num_drafts, req_sizes),
        prefill_chunk_sizes=(4, 16),
        dtype=dtype,
        device="cpu",
        compile_options=CompileOptions(backend, cache_dir, 1),
        draft_temperatures=draft_temperatures or (1.0,) * max(num_drafts, 1),
        show_progress=False,
        native_cache_dir=cache_dir,
        num_snapshots=num_snapshots,
    )
    runner = make_runner(model, options, PhaseClock())
    return CachedRun(model, runner, model)


@pytest.fixture(scope="session")
def new_run() -> Callable[..., CachedRun]:
    """`build_run`: a run of its own for any model."""
    return build_run


@pytest.fixture(scope="session")
def make_run(make_model: Callable[..., DraftModel]) -> Callable[..., CachedRun]:
    """make_run(num_drafts=5, max_num_reqs=8, req_sizes=(1, 3), **changes): a float64 run.
    Runners are shared between the tests that ask for the same one; each call resets it. Two
    Sinkhorn rounds instead of 20, because they are no part of what the cache can break. Keys of 32
    channels where they are kept as records."""
    made: dict[str, CachedRun] = {}

    def make(
        num_drafts: int = 5,
        max_num_reqs: int = 8,
        req_sizes: tuple[int, ...] = (1, 3),
        draft_temperatures: tuple[float, ...] = (),
        verify: VerifyMode = "coupled",
        kv_cache: KvCache = "compute",
        num_snapshots: int = 0,
        rich: bool = False,
        **changes: Any,
    ) -> CachedRun:
        sizes = (num_drafts, max_num_reqs, req_sizes, draft_temperatures, verify)
        if kv_cache == "v41":
            changes = {"head_dim": 32, "index_head_dim": 32, **changes}
        key = repr((sizes, kv_cache, num_snapshots, rich, sorted(changes.items())))
        if key not in made:
            model = make_model(**{"hc_sinkhorn_iters": 2, **changes})
            made[key] = build_run(
                model, *sizes, kv_cache=kv_cache, num_snapshots=num_snapshots, rich=rich
            )
        made[key].reset()
        return made[key]

    return make


@pytest.fixture
def rich_run(
    make_run: Callable[..., CachedRun], layer_changes: dict[int, dict[str, Any]]
) -> Callable[..., CachedRun]:
    """rich_run(num_drafts=3, verify="coupled", **sizes): a float64 run with the rich variant, of up
    to 4 rows, of the small model with every kind of region."""

    def make(num_drafts: int = 3, verify: VerifyMode = "coupled", **sizes: Any) -> CachedRun:
        asked = {"max_num_reqs": 4, "req_sizes": (4,), "rich": True, **sizes}
        return make_run(num_drafts=num_drafts, verify=verify, **asked, **layer_changes[4])

    return make


@pytest.fixture
def four_layer_run(
    request: pytest.FixtureRequest,
    make_run: Callable[..., CachedRun],
    layer_changes: dict[int, dict[str, Any]],
) -> CachedRun:
    """A float64 run of up to 3 rows of the model that `compiled_run` compiles."""
    verify = getattr(request, "param", "coupled")
    return make_run(max_num_reqs=3, req_sizes=(3,), verify=verify, **layer_changes[4])


@pytest.fixture(scope="session")
def compiled_run(
    layer_changes: dict[int, dict[str, Any]],
    make_model: Callable[..., DraftModel],
    make_raw: Callable[..., dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
    native_kernels: Path,
) -> CachedRun:
    """The one inductor compilation of these tests: float32, four layers of every kind, a pool far
    larger than any other tensor, up to three rows. The oracle has the same weights in float64.
    """
    model = make_model(dtype=torch.float32, **layer_changes[4])
    model.head.weight.mul_(4.0)  # choices as clear as a trained model's
    tables: list[RegionTable] = []
    plain = build.make_regions
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Dynamo guards it; `one_thread` comes later than a session fixture
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_regions", lambda *a: tables.append(plain(*a)) or tables[0])
        cache_dir = tmp_path_factory.mktemp("inductor")
        run = build_run(model, 5, 3, (1, 3), (), "coupled", "inductor", cache_dir, 8192)
    run.oracle = make_model(dtype=torch.float64, **layer_changes[4])
    run.oracle.load_state_dict(model.state_dict())
    torch.set_num_threads(threads)
    run.regions = tables[0]
    run.cache_dir, run.raw = cache_dir, make_raw(**layer_changes[4])
    return run


@pytest.fixture(scope="session")
def compiled_records_run(
    layer_changes: dict[int, dict[str, Any]],
    make_model: Callable[..., DraftModel],
    tmp_path_factory: pytest.TempPathFactory,
    native_kernels: Path,
) -> CachedRun:
    """A float32 run over a cache of records. One of each kind of region that touches them is
    compiled, the others run as they are; the oracle is in float64."""
    changes = {**layer_changes[4], "head_dim": 32, "index_head_dim": 32}
    model = make_model(dtype=torch.float32, **changes)
    model.head.weight.mul_(4.0)

    def make_regions(
        config: ModelConfig, capacity: Capacity, compiler: RegionCompiler, backend: Backend,
        kernels: None = None,
    ) -> RegionTable:  # fmt: skip
        calls = {}
        for name, item in build_regions(config, capacity, as_ops=True).items():
            if name in RECORD_REGIONS:
                calls[name] = compiler.region(item.function, item.dynamic, name=name)
            else:
                calls[name] = compiler.opaque(item.function)
        return RegionTable(calls)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_regions", make_regions)
        cache_dir = tmp_path_factory.mktemp("records")
        run = build_run(model, 1, 3, (3,), backend="inductor", cache_dir=cache_dir, kv_cache="v41")
    run.oracle = make_model(dtype=torch.float64, **changes)
    run.oracle.load_state_dict(model.state_dict())
    torch.set_num_threads(threads)
    return run


@pytest.fixture(scope="session")
def embedded_records_run() -> CachedRun:
    """The embedded model in float32 over a cache of records, uncompiled, up to four rows."""
    model = load_model("tiny")
    return build_run(model, 5, 4, (4,), kv_cache="v41")


@pytest.fixture(scope="session")
def make_prompt() -> Callable[[int, int], list[int]]:
    """make_prompt(length, seed): random ids of the small vocabulary."""

    def make(length: int, seed: int) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(96) for _ in range(length)]

    return make


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
