"""An engine's start on CUDA: kernels chosen, loaded, installed and called, on fake CUDA tensors.

`make_runner` runs whole, with fake tensors for memory and a stand-in for torch.cuda: what is shown
is which kernels its steps call, with which weights, and in which order a start does what. No kernel
runs.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from decodegrid.capture.grid import build_grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.phases import PhaseClock
from decodegrid.configs.load import LoadedConfig, load_config
from decodegrid.engine import build, cuda_kernels
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.engine.cuda_kernels import KernelPlan, make_plan, put_in_place, step_shape
from decodegrid.engine.deployment_check import capacity_of
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model_config import ModelConfig, parse_model_config
from decodegrid.graphs.packed_modules import use_packed_modules
from decodegrid.graphs.step_weights import StepWeights, _named_parts
from decodegrid.graphs.weight_packing import pack_weights
from decodegrid.kernels.providers import cuda_step
from decodegrid.kernels.providers.install import served_by_tiles
from decodegrid.kernels.providers.packages import PACKAGES
from decodegrid.kernels.providers.probe import Probe, Target
from decodegrid.kernels.providers.registry import ARCH_OF, as_if_built, as_if_installed

FakeCuda = Callable[[], AbstractContextManager[None]]
ROOT = Path(__file__).resolve().parents[3]
SIZES = (
    "hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank",
    "o_lora_rank", "o_groups", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok",
    "dspark_n_routed_experts", "dspark_num_experts_per_tok", "index_n_heads", "index_head_dim",
    "index_topk", "sliding_window", "candidate_block_size", "candidate_topk_blocks", "vocab_size",
    "max_position_embeddings", "hc_sinkhorn_iters", "hc_eps",
)  # fmt: skip
"""Fields that the model takes from the embedded one, whose kernels are built; layers are few."""
EXTRA = ("cast_fp8_columns-dim512-block32",)
"""Of the fields that reach the drafter from two layers: no kernel is built for that model."""
YAML = """
model: {checkpoint: tiny-v41, device: cuda, dtype: bfloat16, weights: packed}
scheduler: {max_num_reqs: 2, max_model_len: 256, prefill_chunk_sizes: [16]}
cache: {kv_cache: v41, prefix_cache: "off"}
grid: {num_query_tokens_per_req: [1, 6], num_reqs: [2], rich: false}
"""


def write_cubins(folder: Path, arch: str, names: list[str]) -> Path:
    """A folder as the build leaves it, with nothing in its cubins."""
    place = folder / arch
    place.mkdir(parents=True)
    (place / "all.cubin").write_bytes(b"code")
    kernel = {
        "cubin": "all.cubin", "entry": "run", "tensors": [], "arguments": [], "grid": ["1"],
        "block": [32], "shared_bytes": 0,
    }  # fmt: skip
    manifest = {"arch": arch, "kernels": {name: kernel for name in names}}
    (place / "manifest.json").write_text(json.dumps(manifest))
    return place


def all_names(target: Target) -> list[str]:
    return [*sorted(as_if_built(target).names), *EXTRA]


@pytest.fixture(scope="module")
def config(make_raw: Callable[..., dict[str, Any]], layer_changes: dict[int, Any]) -> ModelConfig:
    text = json.loads((ROOT / "configs/tiny-v41/config.json").read_text())["text_config"]
    engram: dict[str, Any] = {"engram_layer_ids": [], "engram_num_embeddings": []}
    sizes = {name: text[name] for name in SIZES}
    return parse_model_config(make_raw(**{**layer_changes[2], **sizes, **engram}))


def deployment(folder: Path, text: str = YAML) -> LoadedConfig:
    path = folder / "deployment.yaml"
    path.write_text(f"{text}\ncompile: {{cubins_dir: cubins, cache_dir: cache}}\n")
    return load_config(path)


class Library:
    """DeepGEMM as far as a start calls it."""

    def __init__(self, log: list[Any]) -> None:
        self.mega = SimpleNamespace(
            get_symm_buffer_for_mega_moe=lambda group, *numbers: log.append(
                ("buffer", group.size(), group.rank(), *numbers)
            )
        )


def ready(target: Target, log: list[Any]) -> tuple[Any, tuple[Probe, ...]]:
    """A card with every library, DeepGEMM a stand-in."""
    device, probes = as_if_installed(PACKAGES, target)
    library: Any = Library(log)
    return device, tuple(
        dataclasses.replace(probe, module=library) if probe.package.name == "deep_gemm" else probe
        for probe in probes
    )


class Recorder(TorchDispatchMode):
    """Notes ops of ours, and the kernels behind those that a kernel of ours serves on CUDA."""

    def __init__(self, log: list[Any], served: tuple[str, ...]) -> None:
        super().__init__()
        self.log, self.served = log, served

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "decodegrid_tile":
            self.log.append(("kernel", args[0]))
        elif func.namespace.startswith("decodegrid"):
            op = func._schema.name.removeprefix("decodegrid::")
            self.log.append(("op", func._schema.name))
            if op in self.served:
                with self:
                    cuda_step.SAME_SCHEMA[op](*args)
        return func(*args, **(kwargs or {}))


class Launcher:
    """Loads, and launches nothing: fake tensors have no memory."""

    def __init__(self, log: list[Any], folder: Path) -> None:
        self.log = log
        log.append(("folder", folder))

    def load(self, names: tuple[str, ...]) -> None:
        self.log.append(("load", *names))

    def __call__(self, name: str, *tensors: Any) -> None:
        raise AssertionError("a fake tensor has no memory")


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def stand_in_for_cuda(patch: pytest.MonkeyPatch, log: list[Any]) -> None:
    @contextmanager
    def block(*what: Any) -> Iterator[None]:
        log.append(("enter", *what))
        yield
        log.append(("leave", *what))

    fakes = {
        "is_available": lambda: True,
        "Stream": Stream,
        "graph_pool_handle": object,
        "CUDAGraph": lambda keep_graph: SimpleNamespace(instantiate=lambda: None),
        "current_stream": lambda device: Stream(),
        "device": lambda device: block("device"),
        "stream": lambda stream: block("warm-up", stream),
        "graph": lambda graph, pool, stream, capture_error_mode: block("capture", stream, pool),
        "mem_get_info": lambda device: (0, 0),
        "memory_reserved": lambda device: 0,
    }
    for name, fake in fakes.items():
        patch.setattr(torch.cuda, name, fake)


@dataclasses.dataclass
class Started:
    """A start and what it did, in order."""

    plan: KernelPlan
    log: list[Any]
    made: SimpleNamespace
    """What the runner was made of."""
    model: DraftModel
    installed: list[tuple[Any, ...]]

    def segment(self, kind: str) -> list[Counter[Any]]:
        """What ran in each block of a kind."""
        found: list[Counter[Any]] = []
        is_inside = False
        for item in self.log:
            if item[:2] == ("enter", kind):
                found.append(Counter())
                is_inside = True
            elif item[:2] == ("leave", kind):
                is_inside = False
            elif is_inside and item[0] in ("kernel", "op"):
                found[-1][item] += 1
        return found


def start(target: Target, config: ModelConfig, folder: Path, fake_cuda: FakeCuda) -> Started:
    log: list[Any] = []
    installed: list[tuple[Any, ...]] = []
    write_cubins(folder / "cubins", ARCH_OF[target], all_names(target))
    loaded = deployment(folder)
    plan = make_plan(loaded, config, *ready(target, log))

    def install(table: Any, launch: Any, source: str, make_buffers: Any) -> None:
        installed.append((table, launch, source, make_buffers and make_buffers()))
        log.append(("install",))

    def runner(model: Any, buffers: Any, grid: Any, graphs: Any, *rest: Any) -> SimpleNamespace:
        return SimpleNamespace(model=model, buffers=buffers, graphs=graphs, facts=rest[-1])

    options = RunnerOptions(
        capacity=capacity_of(loaded.config, 9), grid=build_grid(2, 5, (2,), (1, 6)),
        prefill_chunk_sizes=(16,), dtype=torch.bfloat16, device="cuda",
        compile_options=CompileOptions("none", None, 1), draft_temperatures=(1.0,) * 5,
        show_progress=False, kernels=plan,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, fake_cuda():
        stand_in_for_cuda(patch, log)
        patch.setattr(cuda_kernels, "install", install)
        launcher: Any = partial(Launcher, log)
        place = partial(put_in_place, make_launcher=launcher)
        patch.setattr(build, "put_in_place", place)
        patch.setattr(build, "Runner", runner)
        with torch.device("meta"):
            model = DraftModel(config)
            model.cast(torch.bfloat16)
            use_packed_modules(model, "packed")
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="cuda")))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty_like(buffer, device="cuda"))
        with Recorder(log, served_by_tiles(plan.table)):
            made: Any = make_runner(model, options, PhaseClock())
    return Started(plan, log, made, model, installed)


@pytest.fixture(scope="module")
def started(
    config: ModelConfig, fake_cuda: FakeCuda, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Target], Started]:
    """started(target): each once."""
    found: dict[Target, Started] = {}

    def get(target: Target) -> Started:
        if target not in found:
            found[target] = start(target, config, tmp_path_factory.mktemp("start"), fake_cuda)
        return found[target]

    return get


BOTH = pytest.mark.parametrize(
    "target",
    [pytest.param(target, marks=pytest.mark.kernels) for target in (Target.SM90, Target.SM100)],
)
"""Whole starts: their traces take a while."""


@BOTH
def test_steps_call_what_the_table_chose(
    started: Callable[[Target], Started], target: Target
) -> None:
    """And every kernel that they launch is one that was loaded. Of those that were, gathers are not
    launched, which attention by a kernel does without, nor what reads another layer's candidates,
    because one layer alone of this model looks for entries."""
    made = started(target)
    ops = {item[1] for item in made.log if item[0] == "op"}
    launched = {item[1] for item in made.log if item[0] == "kernel"}
    (loaded,) = [item[1:] for item in made.log if item[0] == "load"]
    assert loaded == made.plan.needed()
    assert launched <= set(loaded)
    left = {name.partition("-")[0] for name in set(loaded) - launched}
    assert left == {"take_records", "mask_scores"}
    if target is Target.SM90:
        assert {"decodegrid_gemm::bf16_gemm", "decodegrid_gemm::grouped_bf16_gemm"} <= ops
        assert {name.partition("-")[0] for name in launched} >= {
            "grouped_fp4", "sparse_mla", "sparse_mla_window", "store_records",
        }  # fmt: skip
    else:
        assert {
            "decodegrid_gemm::fp8_gemm", "decodegrid_gemm::grouped_fp8_gemm",
            "decodegrid_experts::mega_moe",
        } <= ops  # fmt: skip
    plain = {"packed_linear", "packed_grouped_linear", "packed_experts", "routed_experts"}
    assert not {f"decodegrid::{op}" for op in plain} & ops


@BOTH
def test_weights_are_in_the_kernels_form_and_the_model_gave_its_own_up(
    started: Callable[[Target], Started], target: Target
) -> None:
    made = started(target)
    assert {p.device.type for p in (*made.model.parameters(), *made.model.buffers())} == {"meta"}
    layer = made.made.model.weights.layers[1]
    for weight in (layer.attention.w_in, layer.attention.wo_a, layer.moe.shared_w2):
        if target is Target.SM90:
            assert isinstance(weight, torch.Tensor) and weight.dtype == torch.bfloat16
        else:
            assert [part.dtype for part in weight] == [torch.float8_e4m3fn, torch.int32]
    kept = [torch.uint8, torch.uint8] if target is Target.SM90 else [torch.int8, torch.int32]
    for weight in (layer.moe.w13, layer.moe.w2, made.made.model.weights.draft_layers[0].moe.w13):
        assert [part.dtype for part in weight] == kept


@BOTH
def test_all_is_in_place_before_the_first_capture(
    started: Callable[[Target], Started], target: Target
) -> None:
    """Cubins, then buffers, then the process's ops; all of it before the first warm-up."""
    made = started(target)
    kinds = [item[0] for item in made.log]
    first = next(i for i, item in enumerate(made.log) if item[:2] == ("enter", "warm-up"))
    order = ["folder", "load", *(["buffer"] * 2 if target is Target.SM100 else []), "install"]
    assert [kind for kind in kinds[:first] if kind in {"buffer", *order}] == order
    assert not {"folder", "load", "buffer", "install"} & set(kinds[first:])
    assert made.log[kinds.index("folder")][1].name == ARCH_OF[target]


@pytest.mark.kernels
def test_the_fused_experts_buffers_have_the_deployments_numbers(
    started: Callable[[Target], Started],
) -> None:
    """Two requests with five drafts are 12 rows, fewer than a chunk of 16; the drafter makes a
    block of five for each. Experts, rows, experts of a token, hidden and inner size; one rank."""
    made = started(Target.SM100)
    assert [item[1:] for item in made.log if item[0] == "buffer"] == [
        (1, 0, 8, 16, 2, 256, 128), (1, 0, 4, 10, 2, 256, 128),
    ]  # fmt: skip
    ((_, _, source, buffers),) = made.installed
    assert set(buffers) == {(8, 2), (4, 2)}
    assert {mega.limit for mega in buffers.values()} == {10.0}
    assert "16 rows of 2 in 8, 10 rows of 2 in 4" in source
    ((_, _, hopper, none),) = started(Target.SM90).installed
    assert none is None and hopper == f"cubins {started(Target.SM90).plan.table.built.digest}"


@BOTH
def test_captures_are_largest_first_on_one_stream_after_warm_ups_of_the_same(
    started: Callable[[Target], Started], target: Target
) -> None:
    """Each size runs twice, op for op, on the stream that captures it then, into one pool."""
    made = started(target)
    assert [str(key) for key in made.made.start_up.costs] == [
        "prefill 16", "(2, 12) fused", "(2, 2) fused",
    ]  # fmt: skip
    captured, warm = made.segment("capture"), made.segment("warm-up")
    assert len(captured) == len(warm) == 3 and all(captured)
    for once, twice in zip(captured, warm, strict=True):
        assert twice == Counter({item: 2 * count for item, count in once.items()})
    blocks = [item for item in made.log if item[:2] == ("enter", "capture")]
    assert len({id(item[3]) for item in blocks}) == 1
    streams = [item for item in made.log if item[:2] == ("enter", "warm-up")]
    assert len({id(item[2]) for item in (*blocks, *streams)}) == 1


@BOTH
def test_the_choice_is_among_the_facts_and_in_the_report(
    started: Callable[[Target], Started], target: Target
) -> None:
    made = started(target)
    facts, report = made.made.facts, made.made.start_up_report
    assert facts["kernels.cubins"] == made.plan.table.built.digest != ""
    for op, choice in made.plan.table.choices.items():
        assert facts[f"kernels.{op}"] == f"{choice.chosen.kind}: {choice.chosen.call}"
    assert "op expert_exchange runs identity: one rank has nothing to exchange" in report
    assert "op attention" not in report and str(made.plan.folder) in report


def test_a_missing_cubin_is_named(config: ModelConfig, tmp_path: Path) -> None:
    """Its op runs plain torch, and the report says why and how the kernel is built."""
    gone = "sparse_mla-heads8-dim64-page0"
    names = [name for name in all_names(Target.SM90) if name != gone]
    folder = write_cubins(tmp_path / "cubins", "sm_90a", names)
    loaded = deployment(tmp_path)
    plan = make_plan(loaded, config, *ready(Target.SM90, []))
    command = f"python -m decodegrid.kernels.tile.build --arch sm_90a --out {tmp_path}/cubins"
    assert plan.table.chosen("attention").call.startswith("torch gather")
    (line,) = [line for line in plan.lines() if line.startswith("op attention ")]
    assert line.endswith(f" | no cubin of {gone} in {folder}; {command}")
    assert not {name for name in plan.needed() if name.startswith("sparse_mla")}
    whole = make_plan(deployment(tmp_path), config, *ready(Target.SM90, []))
    assert whole.facts() == plan.facts()


def test_a_library_without_the_kernels_beside_it_is_not_chosen(
    config: ModelConfig, tmp_path: Path
) -> None:
    """On Blackwell FP8 products need our casts; each product's weights then stay as they are."""
    names = [name for name in all_names(Target.SM100) if name != EXTRA[0]]
    write_cubins(tmp_path / "cubins", "sm_100a", names)
    plan = make_plan(deployment(tmp_path), config, *ready(Target.SM100, []))
    assert plan.table.chosen("packed_linear").call.startswith("torch linear")
    assert plan.table.chosen("packed_grouped_linear").call == "DeepGEMM fp8_einsum"
    forms = cuda_step.weight_forms(plan.table)
    matrix = [torch.zeros(64, 128, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)]
    stack = [torch.zeros(2, 64, 128, dtype=torch.uint8), torch.zeros(2, 2, 4, dtype=torch.uint8)]
    assert forms.matrix(matrix) is matrix
    assert forms.matrix(stack)[1].dtype == torch.int32


@pytest.mark.parametrize("what", ["nothing there", "no manifest", "another card", "cubin gone"])
def test_a_named_folder_that_is_wrong_is_refused_and_another_is_not(
    what: str, config: ModelConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "cubins" / "sm_90a"
    if what != "nothing there":
        write_cubins(tmp_path / "cubins", "sm_90a", all_names(Target.SM90))
    if what == "no manifest":
        (folder / "manifest.json").write_text("{}")
    elif what == "cubin gone":
        (folder / "all.cubin").unlink()
    elif what == "another card":
        text = (folder / "manifest.json").read_text().replace("sm_90a", "sm_100a")
        (folder / "manifest.json").write_text(text)
    named = deployment(tmp_path)
    with pytest.raises(ValueError) as error:
        make_plan(named, config, *ready(Target.SM90, []))
    text = str(error.value)
    assert text.startswith(f"compile.cubins_dir is {tmp_path}/cubins: {folder}")
    assert text.endswith(f"--arch sm_90a --out {tmp_path}/cubins") and "\n" not in text
    path = tmp_path / "deployment.yaml"
    path.write_text(f"{YAML}\ncompile: {{cache_dir: .}}\n")
    plan = make_plan(load_config(path), config, *ready(Target.SM90, []))
    assert plan.needed() == () and plan.facts()["cubins"] == "none"
    assert plan.table.chosen("linear").call.startswith("DeepGEMM")
    assert any(f"is there: {folder}" in line for line in plan.lines())


def test_without_what_launches_them_no_kernel_is_chosen(
    config: ModelConfig, tmp_path: Path
) -> None:
    write_cubins(tmp_path / "cubins", "sm_90a", all_names(Target.SM90))
    device, probes = ready(Target.SM90, [])
    missing = tuple(probe for probe in probes if probe.package.name != "cuda")
    _, cpu = as_if_installed(PACKAGES, Target.CPU)
    launcher = next(probe for probe in cpu if probe.package.name == "cuda")
    plan = make_plan(deployment(tmp_path), config, device, (*missing, launcher))
    assert plan.needed() == () and plan.table.built.names == frozenset()


@pytest.mark.parametrize("engram", [False, True])
def test_the_inputs_of_packed_projections(
    engram: bool, config: ModelConfig, released_config: ModelConfig, tmp_path: Path
) -> None:
    """Those that the deployment's numbers say are those that the weights have."""
    model_config = released_config if engram else config
    if engram:
        model_config = dataclasses.replace(
            model_config, engram_num_embeddings=tuple(64 for _ in model_config.engram_layer_ids)
        )
    loaded = deployment(tmp_path)
    shape = step_shape(loaded.config, model_config)
    weights = packed_weights(model_config)
    by_rank: dict[int, set[int]] = {2: set(), 3: set()}
    for name, value in _named_parts(weights):
        if isinstance(value, list) and name not in ("w13", "w2", "table"):
            by_rank[value[0].dim()].add(value[0].shape[-1])
    assert set(shape.packed_inputs) == by_rank[2] and {shape.group_inputs} == by_rank[3]
    assert len(set(shape.packed_inputs)) == len(shape.packed_inputs)


def packed_weights(config: ModelConfig) -> StepWeights:
    with torch.device("meta"):
        model = DraftModel(config)
        use_packed_modules(model, "packed")
        return pack_weights(model, with_drafter=True)
