"""A decode step on a device: random weights of a real model's sizes, state, buffers, regions.

Owns the making of a step without a checkpoint, a deployment or a request: what `engine.build` does,
for a machine without its dependencies. The same on the CPU, where the tests run it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decodegrid.graphs.decode_step import decode_step
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.library_weights import lay_out_weights
from decodegrid.graphs.model_config import ModelConfig, parse_model_config
from decodegrid.graphs.packed_modules import use_packed_modules
from decodegrid.graphs.regions import RegionTable, build_regions, plain_regions
from decodegrid.graphs.state import Capacity, DecodeState, allocate_state
from decodegrid.graphs.step_buffers import StepBuffers, allocate_buffers
from decodegrid.graphs.target_step import StepModel
from decodegrid.graphs.weight_packing import pack_weights
from decodegrid.kernels.providers.laid_out import PLAIN_OF_ANY
from decodegrid.kernels.providers.registry import StepShape
from decodegrid.kernels.select_entries import select_entries
from decodegrid.kernels.step_kernels import StepKernels, WeightForms

MAX_CHUNK = 16
"""Tokens of the largest prefill call; a scene makes none."""
ROOT = Path(__file__).resolve().parents[2]
SCALES = (116, 124)
"""E8M0 bytes of random weights: small enough that sums stay finite."""
FEW_LAYERS = {
    "num_hidden_layers": 4, "compress_ratios": [0, 2, 1, 1, 0], "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3], "candidate_source_layer_id": 2,
    "dspark_target_layer_ids": [1, 2, 3], "num_nextn_predict_layers": 1,
}  # fmt: skip
"""Four layers, one of each kind, and one drafter layer: what fits one card of the released model.
"""
NO_ENGRAM = {"engram_layer_ids": [], "engram_num_embeddings": []}
"""The tables of the released model are hundreds of gigabytes, and a hash cannot be random."""


def read_config(path: Path, **changes: Any) -> ModelConfig:
    """A config.json without Engram, and with fields of its text model replaced."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["text_config"].update({**NO_ENGRAM, **changes})
    return parse_model_config(raw)


def shape_of(config: ModelConfig, capacity: Capacity, dtype: torch.dtype) -> StepShape:
    """What decides whether kernels fit: `decodegrid.engine.cuda_kernels.step_shape`, without a
    deployment."""
    sources = [config.compress_ratios[layer] for layer in config.kv_source_layer_ids]
    has_candidates = config.candidate_source_layer_id is not None and bool(sources)
    return StepShape(
        dtype=str(dtype).removeprefix("torch."),
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        index_topk=config.index_topk,
        window=config.sliding_window,
        moe_inner=config.moe_intermediate_size,
        num_experts=config.n_routed_experts,
        vocab_size=config.vocab_size,
        block_size=capacity.block_size,
        hc_mult=config.hc_mult,
        hc_iters=config.hc_sinkhorn_iters,
        hc_eps=config.hc_eps,
        kv_records=capacity.kv_cache == "v41",
        packed_matrices=True,
        packed_experts=True,
        draft_experts=config.dspark_n_routed_experts if capacity.num_draft_tokens else 0,
        packed_inputs=_packed_inputs(config, capacity),
        group_inputs=config.num_attention_heads * config.head_dim // config.o_groups,
        ratios=tuple(sorted(set(sources))),
        candidate_block=config.candidate_block_size if has_candidates else 0,
        candidate_count=config.candidate_topk_blocks if has_candidates else 0,
    )


def _packed_inputs(config: ModelConfig, capacity: Capacity) -> tuple[int, ...]:
    """Inputs of the FP8 projections, each number once; Engram's are not there."""
    found = [
        config.hidden_size,
        config.q_lora_rank,
        config.o_groups * config.o_lora_rank,
        config.moe_intermediate_size,
    ]
    if capacity.num_draft_tokens:
        found.append(config.hidden_size * len(config.dspark_target_layer_ids))
    return tuple(dict.fromkeys(found))


def random_like(part: Any, device: str, generator: torch.Generator) -> Any:
    """The same dataclass with random tensors on the device for tensors of any kind."""
    if isinstance(part, Tensor):
        return _random(part, device, generator)
    if isinstance(part, list):
        return [_random_codes(part[0], device, generator), _scales(part[1], device, generator)]
    if isinstance(part, tuple):
        return tuple(random_like(item, device, generator) for item in part)
    if is_dataclass(part):
        values = {
            f.name: random_like(getattr(part, f.name), device, generator) for f in fields(part)
        }
        return replace(part, **values)  # type: ignore[type-var]
    return part


def _random(like: Tensor, device: str, generator: torch.Generator) -> Tensor:
    if not like.dtype.is_floating_point:
        return torch.randint(0, 32, like.shape, generator=generator, device=device).to(like.dtype)
    values = torch.randn(like.shape, generator=generator, device=device)
    if like.dim() == 1:
        return (1.0 + 0.1 * values).to(like.dtype)
    return (values * like.shape[-1] ** -0.5).to(like.dtype)


def _random_codes(like: Tensor, device: str, generator: torch.Generator) -> Tensor:
    codes = torch.randint(0, 256, like.shape, generator=generator, device=device, dtype=torch.uint8)
    # 0x7f and 0xff are NaN as FP8; as two FP4 codes they would be numbers as good as any.
    return codes.masked_fill_((codes & 0x7F) == 0x7F, 0)


def _scales(like: Tensor, device: str, generator: torch.Generator) -> Tensor:
    low, high = SCALES
    return torch.randint(
        low, high, like.shape, generator=generator, device=device, dtype=torch.uint8
    )


@dataclass(slots=True)
class Scene:
    """A step of each pair over one model, state and set of buffers."""

    config: ModelConfig
    model: StepModel
    buffers: StepBuffers
    regions: RegionTable
    divisors: Tensor

    def step(self, num_reqs: int, num_tokens: int) -> Callable[[], None]:
        """The step of a pair, bound to its buffers; the same input at each call if the state is
        restored between."""

        def run() -> None:
            decode_step(self.regions, self.model, self.buffers, self.divisors, num_reqs, num_tokens)

        return run

    def ask(self, num_reqs: int, num_tokens: int) -> None:
        """Put the pair's rows and total into the input buffers."""
        rows = self.buffers.rows.slots
        rows.zero_()
        rows[:num_reqs] = torch.arange(1, num_reqs + 1, device=rows.device)
        self.buffers.total.fill_(num_tokens)

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of all state."""
        return {name: tensor.clone() for name, tensor in self.model.state.tensors()}

    def restore(self, before: dict[str, Tensor]) -> None:
        """Back to a copy, in place."""
        for name, tensor in self.model.state.tensors():
            tensor.copy_(before[name])

    def results(self) -> dict[str, Tensor]:
        """State and what the host reads, copied."""
        rows, output = self.buffers.rows, self.buffers.output
        found = {"token_ids": rows.token_ids, "num_emitted": rows.num_emitted}
        found["logits"] = output.logits
        return {**self.snapshot(), **{name: value.clone() for name, value in found.items()}}


def fill_state(state: DecodeState, vocab: int, head_dim: int, generator: torch.Generator) -> None:
    """Requests of half the greatest length in every slot but the null one, drafts and all.

    Windows hold random records. Those of the pools stay zero: keys of value zero, which are as much
    work as any.
    """
    slots, capacity = state.slots, state.capacity
    device, count = slots.seq_len.device, capacity.num_slots
    context = capacity.max_model_len // 2

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator, device=device)

    slots.last_token.copy_(ints(vocab, count))
    slots.history.copy_(ints(vocab, count, 3))
    slots.seq_len.copy_(context - ints(2, count))
    slots.max_seq_len.fill_(capacity.max_model_len)
    slots.drafts.copy_(ints(vocab, *slots.drafts.shape))
    slots.num_drafts.fill_(capacity.num_draft_tokens)
    slots.confidence.copy_(torch.rand(slots.confidence.shape, generator=generator, device=device))
    slots.seed.copy_(torch.arange(count, device=device))
    blocks = torch.arange(slots.block_table.numel(), device=device).view_as(slots.block_table)
    slots.block_table.copy_(1 + blocks % (capacity.num_blocks - 1))
    slots.seq_len[0] = 1
    slots.num_drafts[0] = 0
    slots.block_table[0] = 0
    for ring in state.window_rings:
        ring[:, :head_dim].copy_(ints(120, ring.shape[0], head_dim))
        ring[:, head_dim:].fill_(SCALES[0])


def make_scene(
    config: ModelConfig,
    capacity: Capacity,
    device: str,
    dtype: torch.dtype,
    kernels: StepKernels,
    forms: WeightForms | None,
) -> Scene:
    """A scene with random weights; forms None leaves packed weights as a checkpoint has them."""
    generator = torch.Generator(device=device).manual_seed(1)
    with torch.device("meta"):
        shell = DraftModel(config)
        shell.cast(dtype)
        use_packed_modules(shell, "packed")
        weights = pack_weights(shell, with_drafter=True, storage=None)
    weights = random_like(weights, device, generator)
    if forms is not None:
        weights = lay_out_weights(weights, forms)
    state = allocate_state(config, capacity, dtype, device)
    buffers = allocate_buffers(config, capacity, MAX_CHUNK, dtype, device)
    fill_state(state, config.vocab_size, config.head_dim, generator)
    regions = plain_regions(build_regions(config, capacity, as_ops=True, kernels=kernels))
    divisors = torch.ones(capacity.num_draft_tokens, dtype=torch.float32, device=device)
    return Scene(config, StepModel(config, weights, state), buffers, regions, divisors)


def plain_scene(scene: Scene) -> Scene:
    """The same model, state and buffers with plain torch everywhere; may wait for the device."""
    specs = build_regions(
        scene.config, scene.model.state.capacity, as_ops=False, kernels=PLAIN_OF_ANY
    )
    calls = {**plain_regions(specs).calls, "select_entries": select_entries}
    return replace(scene, regions=RegionTable(calls))


def weight_bytes(scene: Scene, num_tokens: int) -> int:
    """Bytes of weights that a step reads at least: every matrix once, and of the experts those
    that its tokens can visit."""
    total = 0
    config, weights = scene.config, scene.model.weights
    for layers, top_k in (
        (weights.layers, config.num_experts_per_tok),
        (weights.draft_layers, config.dspark_num_experts_per_tok),
    ):
        for layer in layers:
            experts = [part for w in (layer.moe.w13, layer.moe.w2) for part in _parts(w)]
            held = experts[0].shape[0]
            visited = min(num_tokens * top_k, held)
            total += sum(_bytes(part) for part in experts) * visited // held
            total += sum(
                _bytes(part)
                for name in ("w_in", "wq_b", "wo_a", "wo_b")
                for part in _parts(getattr(layer.attention, name))
            )
            total += sum(
                _bytes(part)
                for weight in (layer.moe.shared_w13, layer.moe.shared_w2)
                for part in _parts(weight)
            )
    return total + _bytes(weights.head)


def _parts(weight: Tensor | list[Tensor]) -> list[Tensor]:
    return [weight] if isinstance(weight, Tensor) else weight


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
