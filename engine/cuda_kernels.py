"""The kernels of a CUDA engine: chosen, loaded, installed, and handed to its step.

Owns the way from a deployment to what the regions of its steps call. Does not own the choice
(`decodegrid.kernels.providers.registry`), what is bound (`.install`), nor the step. On the CPU
there is no plan, and steps call what they always did.

The order at start: the plan before any weight is read, so that a wrong folder is found in seconds;
then, with the packed weights in memory and before the pool is sized, every cubin that the chosen
kernels launch is loaded, which a capture may not do, the fused experts' buffers are made, all is
bound to the process, and the weights take the form that the kernels read.

Data flow: deployment and model config -> `KernelPlan` -> `StepKernels` and `WeightForms` -> regions
and weights. Nothing here has run on a card.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from decodegrid.configs.load import LoadedConfig
from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine.cubin_folder import cubin_folder, find_cubins
from decodegrid.engine.deployment_check import weight_form
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.library_weights import lay_out_weights
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.state import Capacity
from decodegrid.graphs.step_buffers import MIN_ROWS
from decodegrid.graphs.step_weights import StepWeights
from decodegrid.kernels.providers import cuda_step
from decodegrid.kernels.providers.cubins import CubinLauncher
from decodegrid.kernels.providers.deep_gemm_experts import (
    Buffers,
    MegaMoe,
    OneRank,
    make_mega_buffer,
)
from decodegrid.kernels.providers.implementations import IMPLEMENTATIONS
from decodegrid.kernels.providers.install import install
from decodegrid.kernels.providers.packages import CUDA_PYTHON, PACKAGES
from decodegrid.kernels.providers.probe import Device, Probe, Target, probe_all, read_device
from decodegrid.kernels.providers.registry import (
    ARCH_OF,
    BuiltKernels,
    Choice,
    KernelTable,
    Kind,
    NativeState,
    StepShape,
    choose,
)
from decodegrid.kernels.step_kernels import StepKernels, WeightForms

NOT_NATIVE = NativeState(False, "for the CPU")

MakeLauncher = Callable[[Path], CubinLauncher]


def step_shape(config: DeploymentConfig, model: ModelConfig) -> StepShape:
    """The numbers of a deployment that decide whether a kernel fits, and which ones are needed."""
    form = weight_form(config, model)
    drafts = config.speculation.num_draft_tokens > 0
    sources = [model.compress_ratios[layer] for layer in model.kv_source_layer_ids]
    has_candidates = model.candidate_source_layer_id is not None and bool(sources)
    return StepShape(
        dtype=config.model.dtype,
        hidden_size=model.hidden_size,
        num_heads=model.num_attention_heads,
        head_dim=model.head_dim,
        index_heads=model.index_n_heads,
        index_dim=model.index_head_dim,
        index_topk=model.index_topk,
        window=model.sliding_window,
        moe_inner=model.moe_intermediate_size,
        num_experts=model.n_routed_experts,
        vocab_size=model.vocab_size,
        block_size=config.cache.block_size,
        hc_mult=model.hc_mult,
        hc_iters=model.hc_sinkhorn_iters,
        hc_eps=model.hc_eps,
        kv_records=config.cache.kv_cache == "v41",
        packed_matrices=form == "packed",
        packed_experts=form in ("packed", "packed_experts"),
        draft_experts=model.dspark_n_routed_experts if drafts else 0,
        packed_inputs=_packed_inputs(model, drafts) if form == "packed" else (),
        group_inputs=_group_inputs(model) if form == "packed" else 0,
        ratios=tuple(sorted(set(sources))),
        candidate_block=model.candidate_block_size if has_candidates else 0,
        candidate_count=model.candidate_topk_blocks if has_candidates else 0,
    )


def _group_inputs(model: ModelConfig) -> int:
    return model.num_attention_heads * model.head_dim // model.o_groups


def _packed_inputs(model: ModelConfig, has_drafts: bool) -> tuple[int, ...]:
    """Inputs of the projections that a quantised checkpoint stores in FP8."""
    found = [
        model.hidden_size,
        model.q_lora_rank,
        model.o_groups * model.o_lora_rank,
        model.moe_intermediate_size,
    ]
    if model.engram_layer_ids:
        columns = (model.engram_max_ngram_size - 1) * model.engram_n_heads
        found.append(columns * model.engram_head_dim)
    if has_drafts:
        found.append(model.hidden_size * len(model.dspark_target_layer_ids))
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """What a CUDA step will call, before anything is loaded."""

    table: KernelTable
    shape: StepShape
    folder: Path
    """Of the device's cubins."""

    def needed(self) -> tuple[str, ...]:
        """The kernels of ours that the chosen implementations launch, by name."""
        names = (self.table.chosen(op).needs(self.shape) for op in self.table.choices)
        return tuple(sorted({name for part in names for name in part}))

    def facts(self) -> dict[str, str]:
        """What generated code depends on: each op's implementation, and the cubins."""
        found = {
            op: f"{choice.chosen.kind}: {choice.chosen.call}"
            for op, choice in self.table.choices.items()
        }
        return {**found, "cubins": self.table.built.digest or "none"}

    def lines(self) -> list[str]:
        """For the start-up report: what kernels there are, and each op that runs plain torch
        although this device has another form of it, with the reason."""
        others = [c for c in self.table.choices.values() if c.chosen.kind is not Kind.REFERENCE]
        count, built = len(self.table.choices), self.table.built
        device = self.table.device.words
        first = (
            f"kernels for {device}: {len(others)} of {count} ops by libraries or kernels of ours"
        )
        first += f", {len(self.needed())} cubins of {self.folder}" if built.names else ""
        return [first, *(line for c in self.table.choices.values() for line in self._why(c))]

    def _why(self, choice: Choice) -> list[str]:
        target = self.table.device.target
        rejected = [item for item in choice.rejected if target in item.implementation.targets]
        if choice.chosen.kind is not Kind.REFERENCE or not rejected:
            return []
        reasons = (
            f"{item.reason}; {item.install}" if item.install else item.reason for item in rejected
        )
        return [f"op {choice.op} runs {choice.chosen.call}: {' | '.join(dict.fromkeys(reasons))}"]


def plan_kernels(loaded: LoadedConfig, model: ModelConfig) -> KernelPlan | None:
    """The choice of kernels for a deployment on CUDA; None on the CPU.

    Imports the libraries that fit the card. Raises ValueError for a folder of cubins that the
    deployment names and that cannot be used.
    """
    if loaded.config.model.device != "cuda":
        return None
    device = read_device(loaded.config.model.device)
    return make_plan(loaded, model, device, probe_all(PACKAGES, device))


def make_plan(
    loaded: LoadedConfig, model: ModelConfig, device: Device, probes: tuple[Probe, ...]
) -> KernelPlan:
    """The same for a device that is given. Raises ValueError as `plan_kernels` does."""
    arch = ARCH_OF.get(device.target, "")
    built = BuiltKernels(frozenset(), f"is for {device.words}")
    if arch:
        built = find_cubins(loaded, arch)
        launcher = next(probe for probe in probes if probe.package is CUDA_PYTHON)
        if not launcher.is_ready:
            where = f"can be launched: {launcher.reason}"
            built = BuiltKernels(frozenset(), where, CUDA_PYTHON.install)
    shape = step_shape(loaded.config, model)
    table = choose(IMPLEMENTATIONS, device, probes, shape, NOT_NATIVE, built)
    return KernelPlan(table, shape, cubin_folder(loaded, arch))


def put_in_place(
    plan: KernelPlan,
    model: ModelConfig,
    capacity: Capacity,
    max_chunk: int,
    make_launcher: MakeLauncher = CubinLauncher,
) -> tuple[StepKernels, WeightForms]:
    """Load and install what the plan chose, for this process.

    max_chunk: the largest captured prefill size, in tokens. make_launcher: takes the folder.

    Raises:
        ValueError: this process has installed something else, or a cubin does not fit.
        ImportError, RuntimeError: the driver refuses.
    """
    table, needed = plan.table, plan.needed()
    launch = None
    if needed:
        launch = make_launcher(plan.folder)
        launch.load(needed)
    source, make_buffers = f"cubins {table.built.digest or 'none'}", None
    if table.device.target is Target.SM100 and table.uses("packed_experts", Kind.LIBRARY):
        sizes = expert_rows(model, capacity, max_chunk)
        numbers = ", ".join(f"{rows} rows of {top} in {count}" for (count, top), rows in sizes)
        source += f"; expert buffers {numbers}, {model.hidden_size}, {model.moe_intermediate_size}"
        source += f", limit {model.swiglu_limit}"
        make_buffers = partial(expert_buffers, table.module("deep_gemm"), model, dict(sizes))
    install(table, launch, source, make_buffers)
    return cuda_step.make_kernels(table), cuda_step.weight_forms(table)


def expert_rows(
    model: ModelConfig, capacity: Capacity, max_chunk: int
) -> tuple[tuple[tuple[int, int], int], ...]:
    """((experts, experts of a token), most rows of a call) of target and drafter: the rows of
    `decodegrid.graphs.step_buffers.allocate_buffers`."""
    num_rows = max(capacity.num_slots - 1, MIN_ROWS)
    tokens = max(num_rows * (capacity.num_draft_tokens + 1), max_chunk, MIN_ROWS)
    found = {(model.n_routed_experts, model.num_experts_per_tok): tokens}
    if capacity.num_draft_tokens:
        key = model.dspark_n_routed_experts, model.dspark_num_experts_per_tok
        found[key] = max(found.get(key, 0), num_rows * model.dspark_block_size)
    return tuple(found.items())


def expert_buffers(
    module: Any, model: ModelConfig, sizes: Mapping[tuple[int, int], int]
) -> Buffers:
    """The fused experts' buffers; synchronises, so before any capture.

    module: DeepGEMM. sizes: as `expert_rows` says.
    """
    group = OneRank()
    return {
        (experts, top_k): MegaMoe(
            make_mega_buffer(
                module, group, experts, rows, top_k, model.hidden_size, model.moe_intermediate_size
            ),
            model.swiglu_limit,
        )
        for (experts, top_k), rows in sizes.items()
    }


def lay_out_model(model: DraftModel, weights: StepWeights, forms: WeightForms) -> StepWeights:
    """The packed weights of a model in the kernels' form. The model is left without memory, so that
    no matrix is held in both forms for longer than its change takes."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            shape = torch.empty_like(parameter, device="meta")
            setattr(module, name, nn.Parameter(shape, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device="meta"))
    return lay_out_weights(weights, forms)
