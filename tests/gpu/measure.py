"""The parts of a run that need the card: values, captured steps, times. Has run on no card yet.

Data flow: cubins -> launcher -> cases compared with plain torch; scenes -> CudaBackend -> replays
compared with the plain step, counted and timed -> rows.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from decodegrid.capture.cuda import CudaBackend, CudaGraph
from decodegrid.capture.cuda_nodes import CudaBindings, read_nodes
from decodegrid.graphs.state import Capacity
from decodegrid.kernels.providers import cuda_step
from decodegrid.kernels.providers.cubins import CubinLauncher, KernelFacts
from decodegrid.kernels.providers.implementations import IMPLEMENTATIONS
from decodegrid.kernels.providers.install import install
from decodegrid.kernels.providers.packages import PACKAGES
from decodegrid.kernels.providers.probe import Device, Target, probe_all
from decodegrid.kernels.providers.registry import (
    BuiltKernels,
    KernelTable,
    Kind,
    NativeState,
    choose,
)
from tests.gpu.case_form import compare
from tests.gpu.cases import CASES
from tests.gpu.experts import expert_buffers
from tests.gpu.figures import PEAK_BYTES_PER_S, Row, microseconds, share_of_peak
from tests.gpu.scene import (
    FEW_LAYERS,
    ROOT,
    Scene,
    make_scene,
    plain_scene,
    read_config,
    shape_of,
    weight_bytes,
)

DTYPE, CARD = torch.bfloat16, "cuda"
DRAFTS = 5
PAIRS = ((32, 192), (8, 48), (8, 8), (1, 6), (1, 1))
"""(requests, query tokens), largest first as an engine captures them."""
TOLERANCE = 0.08
"""Of logits in units of their spread: bfloat16 sums in other orders."""
SAMPLES, LAUNCHES = 20, 20


@dataclass(frozen=True, slots=True)
class Setting:
    """A model and the state of its step."""

    path: Path
    capacity: Capacity
    changes: Mapping[str, object]


TINY = Setting(
    ROOT / "configs/tiny-v41/config.json", Capacity(33, 33 * 8, 64, 512, DRAFTS, kv_cache="v41"), {}
)
RELEASED = Setting(
    ROOT / "tests/released_config.json",
    Capacity(33, 33 * 16, 128, 2048, DRAFTS, kv_cache="v41"),
    FEW_LAYERS,
)
SETTINGS = (TINY, RELEASED)


def split_name(facts: KernelFacts, manifest: dict[str, dict[str, object]]) -> tuple[str, dict]:
    """Op and sizes of a kernel, as its manifest has them."""
    item = manifest[facts.name]
    return str(item["op"]), dict(item["sizes"])  # type: ignore[call-overload]


def event_seconds(call: Callable[[], None], samples: int) -> list[float]:
    """Seconds of each of some calls, by events around it."""
    found = []
    for _ in range(samples):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / 1e3)
    return found


class Bench:
    """The card, its kernels, and the parts of a run."""

    def __init__(self, device: Device, folder: Path) -> None:
        self.device = device
        self.launch = CubinLauncher(folder)
        self.manifest = json.loads((folder / "manifest.json").read_text())["kernels"]
        self.peak = PEAK_BYTES_PER_S["sm90" if device.target is Target.SM90 else "sm100"]
        self.probes = probe_all(PACKAGES, device)

    def values(self) -> Iterator[Row]:
        """Every kernel that was built, against plain torch on the CPU."""
        self.launch.load(list(self.launch.kernels))
        yield Row("cubins loaded", str(len(self.launch.kernels)))
        wrong = []
        for name, facts in self.launch.kernels.items():
            op, sizes = split_name(facts, self.manifest)
            case = CASES[op](sizes)
            tensors = [tensor.to(CARD) for tensor in case.tensors]
            self.launch(name, *tensors)
            torch.cuda.synchronize()
            outcome = compare(case, [tensor.cpu() for tensor in tensors])
            if not outcome.is_right:
                wrong.append(name)
                yield Row(f"values {name}", "FAILED", f"largest difference {outcome.worst:.3g}")
        count = len(self.launch.kernels)
        yield Row("kernels with the right values", f"{count - len(wrong)} of {count}")

    def table(self, setting: Setting) -> KernelTable:
        """What runs here; bound to the ops, once for the models of all settings."""
        config = read_config(setting.path, **setting.changes)
        shape = shape_of(config, setting.capacity, DTYPE)
        native = NativeState(False, "for the CPU")
        built = BuiltKernels(frozenset(self.launch.kernels), "is among those that came along")
        table = choose(IMPLEMENTATIONS, self.device, self.probes, shape, native, built)
        make_buffers = None
        if self.device.target is Target.SM100 and table.uses("packed_experts", Kind.LIBRARY):
            models = [(read_config(s.path, **s.changes), s.capacity) for s in SETTINGS]
            make_buffers = partial(expert_buffers, table.module("deep_gemm"), models)
        install(table, self.launch, "kernels of this run", make_buffers)
        return table

    def scene(self, setting: Setting) -> tuple[Scene, KernelTable]:
        """A step of a model with the kernels that were chosen for it."""
        config = read_config(setting.path, **setting.changes)
        table = self.table(setting)
        kernels, forms = cuda_step.make_kernels(table), cuda_step.weight_forms(table)
        return make_scene(config, setting.capacity, CARD, DTYPE, kernels, forms), table

    def tiny_step(self) -> Iterator[Row]:
        """The embedded model's sizes: kernels against plain torch, graph against eager."""
        yield from self.steps("tiny", *self.scene(TINY))

    def released_step(self) -> Iterator[Row]:
        """The released model's sizes in four layers and one drafter layer."""
        yield from self.steps("released sizes", *self.scene(RELEASED))

    def steps(self, name: str, scene: Scene, table: KernelTable) -> Iterator[Row]:
        """All pairs of one scene."""
        for op, choice in table.choices.items():
            if choice.chosen.kind is not Kind.REFERENCE:
                yield Row(f"{name}, op {op}", str(choice.chosen.kind), choice.chosen.call)
        before = scene.snapshot()
        backend = CudaBackend(torch.device(CARD))
        for pair in PAIRS:
            yield from self.pair(name, scene, backend, pair, before)

    def pair(
        self, name: str, scene: Scene, backend: CudaBackend, pair: tuple[int, int],
        before: dict[str, Tensor],
    ) -> Iterator[Row]:  # fmt: skip
        """One pair: plain torch, the chosen kernels, the captured graph."""
        scene.ask(*pair)
        label = f"{name} {pair}"
        with torch.no_grad():
            plain_scene(scene).step(*pair)()
            plain = scene.results()
            scene.restore(before)
            step = scene.step(*pair)
            step()
            eager = scene.results()
            scene.restore(before)
            graph = backend.capture(pair, step)
            scene.restore(before)
            graph.replay()
            torch.cuda.synchronize()
        replayed = scene.results()
        scene.restore(before)
        other = [key for key, value in eager.items() if not _equal(value, replayed[key])]
        yield Row(f"{label} graph = eager", "FAILED" if other else "ok", ", ".join(other[:3]))
        wide, spread = eager["logits"][: pair[1]].double(), plain["logits"][: pair[1]].double()
        gap = float((wide - spread).abs().max() / spread.std())
        result = "ok" if gap <= TOLERANCE else "FAILED"
        yield Row(f"{label} logits against plain torch", result, f"{gap:.3g} of their spread")
        yield from self.figures(label, scene, graph, pair, before)

    def figures(
        self, label: str, scene: Scene, graph: CudaGraph, pair: tuple[int, int],
        before: dict[str, Tensor],
    ) -> Iterator[Row]:  # fmt: skip
        """Nodes, time and share of the memory's peak of one captured pair."""
        nodes = read_nodes(graph.raw_graph, CudaBindings.load())
        kinds = ", ".join(f"{count} {kind}" for kind, count in nodes.kinds.most_common())
        yield Row(f"{label} nodes", str(sum(nodes.kinds.values())), kinds)

        def once() -> None:
            scene.restore(before)
            scene.ask(*pair)

        samples = []
        for _ in range(SAMPLES):
            once()
            samples += event_seconds(graph.replay, 1)
        middle = sorted(samples)[SAMPLES // 2]
        share = share_of_peak(weight_bytes(scene, pair[1]), middle, self.peak)
        yield Row(f"{label} step", microseconds(samples), f"weights alone: {share}")

    def kernel_times(self) -> Iterator[Row]:
        """Each product and attention kernel of the released sizes, alone, against the memory."""
        for name, facts in self.launch.kernels.items():
            op, sizes = split_name(facts, self.manifest)
            if op not in ("grouped_fp4", "sparse_mla", "index_logits"):
                continue
            if self.manifest[name]["model"] != "flash":
                continue
            case = CASES[op](sizes)
            tensors = [tensor.to(CARD) for tensor in case.tensors]

            def many(name: str = name, tensors: list[Tensor] = tensors) -> None:
                for _ in range(LAUNCHES):
                    self.launch(name, *tensors)

            many()
            samples = [seconds / LAUNCHES for seconds in event_seconds(many, 5)]
            share = share_of_peak(case.moved, min(samples), self.peak)
            yield Row(f"time {name}", microseconds(samples), f"what it touches once: {share}")


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, so that NaN equals itself."""
    if not one.numel():
        return one.shape == other.shape
    parts = [tensor.contiguous().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*parts)
