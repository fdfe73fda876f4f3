"""The least work of one decode step: bytes that must be read or written, and operations.

Owns the counting rules; measures nothing. Counted are weights (each tensor once, of the routed
experts and tables only what the tokens touch) and state (rings, pools). Not counted are activations
between regions, pads, and integer bookkeeping, so that a measured step can only be slower than the
floor. One multiply-add counts as 2 operations; only products count.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from torch import Tensor

from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.step_weights import LayerWeights, StepWeights, storage_form


@dataclass(frozen=True, slots=True)
class StepShape:
    """The live sizes of a step."""

    num_reqs: int
    num_query_tokens: int
    context: int
    """Committed tokens of each request."""
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """Bytes and operations of one step."""

    weight_bytes: float
    state_bytes: float
    flops: float

    def __add__(self, other: "StepWork") -> "StepWork":
        return StepWork(
            self.weight_bytes + other.weight_bytes,
            self.state_bytes + other.state_bytes,
            self.flops + other.flops,
        )

    def floor_seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The roofline: the longer of moving the bytes and doing the operations."""
        return max((self.weight_bytes + self.state_bytes) / bytes_per_s, self.flops / flops_per_s)


def experts_touched(num_experts: int, per_token: int, num_tokens: int) -> float:
    """Expected number of different experts when every token draws `per_token` at random."""
    return num_experts * (1.0 - (1.0 - per_token / num_experts) ** num_tokens)


def step_work(weights: StepWeights, config: ModelConfig, shape: StepShape) -> StepWork:
    """Work of one decode step with these weights; the drafter's part where they have one.

    Raises ValueError for packed weights: what they cost is decoding, which is not counted here.
    """
    if "packed" in storage_form(weights):
        raise ValueError("the least work is counted for float weights; set model.weights: expanded")
    total = StepWork(0.0, 0.0, 0.0)
    for index, layer in enumerate(weights.layers):
        total += layer_weight_work(
            layer, config.num_experts_per_tok, shape.num_query_tokens, config.engram_columns
        )
        total += target_attention_work(config, index, shape, weights.embed.element_size())
    total += _ends_work(weights, shape)
    if weights.draft_head is not None:
        total += _draft_work(weights, config, shape)
    return total


def layer_weight_work(
    layer: LayerWeights, experts_per_token: int, num_tokens: int, engram_columns: int
) -> StepWork:
    """One layer's projections, experts and table rows for `num_tokens` tokens."""
    matrices, rest = layer_tensors(layer)
    moe = layer.moe
    num_experts = moe.w13.shape[0]
    expert_size = (moe.w13.numel() + moe.w2.numel()) / num_experts
    touched = experts_touched(num_experts, experts_per_token, num_tokens)
    num_bytes = _bytes((*matrices, *rest)) + touched * expert_size * moe.w13.element_size()
    if layer.engram is not None:
        row = layer.engram.table.shape[1] * layer.engram.table.element_size()
        num_bytes += num_tokens * engram_columns * row
    size = sum(matrix.numel() for matrix in matrices)
    flops = 2.0 * num_tokens * (size + experts_per_token * expert_size)
    return StepWork(num_bytes, 0.0, flops)


def layer_tensors(layer: LayerWeights) -> tuple[list[Tensor], list[Tensor]]:
    """(matrices that every token multiplies once, small tensors); without experts and tables."""
    attention, moe = layer.attention, layer.moe
    matrices = [
        layer.attn_mix.fn,
        layer.ffn_mix.fn,
        attention.w_in,
        attention.wq_b,
        attention.wo_a,
        attention.wo_b,
        moe.gate,
        moe.shared_w13,
        moe.shared_w2,
    ]
    rest = [attention.q_norm, attention.kv_norm, attention.frequencies, attention.sink, moe.bias]
    for mix in (layer.attn_mix, layer.ffn_mix):
        rest += [mix.scale, mix.base, mix.norm]
    if layer.source is not None:
        matrices += [layer.source.w_in, layer.source.wk]
        rest += [layer.source.norm, layer.source.k_norm]
    if layer.index is not None:
        matrices += [getattr(layer.index, item.name) for item in fields(layer.index)]
    if layer.engram is not None:
        matrices.append(layer.engram.wkv)
        rest += [layer.engram.q_weight, layer.engram.k_weight]
    return matrices, rest


def target_attention_work(
    config: ModelConfig, index: int, shape: StepShape, item_bytes: int
) -> StepWork:
    """Attention and index selection of one target layer over its live keys."""
    head_dim, index_dim, heads = config.head_dim, config.index_head_dim, config.index_n_heads
    rows, tokens = shape.num_reqs, shape.num_query_tokens
    window = min(shape.context, config.sliding_window)
    keys = window
    items = rows * window * head_dim + 2 * tokens * head_dim  # new keys: written, then read
    flops = 0.0
    ratio = config.compress_ratios[index]
    if ratio:
        entries = shape.context // ratio
        selected = min(entries, config.index_topk)
        keys += selected
        items += rows * selected * head_dim
        if index in config.kv_source_layer_ids:
            items += tokens * (head_dim + index_dim) // ratio
        if index in config.index_source_layer_ids and _scores_entries(config, index, entries):
            items += rows * entries * index_dim
            flops += 2.0 * tokens * entries * heads * (index_dim + 1)
    flops += 4.0 * tokens * config.num_attention_heads * head_dim * keys
    return StepWork(0.0, float(items * item_bytes), flops)


def _scores_entries(config: ModelConfig, index: int, entries: int) -> bool:
    """Whether the selection needs scores: more than fit, or candidate blocks to write or read."""
    source = config.candidate_source_layer_id
    return entries > config.index_topk or (source is not None and index >= source)


def _ends_work(weights: StepWeights, shape: StepShape) -> StepWork:
    """Embedding rows, the last norm and the head."""
    tokens = shape.num_query_tokens
    row = weights.embed.shape[1] * weights.embed.element_size()
    num_bytes = tokens * row + _bytes((weights.norm, weights.head))
    return StepWork(float(num_bytes), 0.0, 2.0 * tokens * weights.head.numel())


def _draft_work(weights: StepWeights, config: ModelConfig, shape: StepShape) -> StepWork:
    """Context keys of the query tokens, then one block for each request, head and Markov chain."""
    head = weights.draft_head
    assert head is not None
    rows, head_dim = shape.num_reqs, config.head_dim
    tokens, drafts = rows * config.dspark_block_size, rows * shape.num_draft_tokens
    item_bytes = weights.embed.element_size()
    total = StepWork(0.0, 0.0, 0.0)
    window = min(shape.context, config.sliding_window)
    for layer in weights.draft_layers:
        total += layer_weight_work(
            layer, config.dspark_num_experts_per_tok, tokens, config.engram_columns
        )
        context_keys = 2.0 * shape.num_query_tokens * head_dim * config.hidden_size
        keys = window + config.dspark_block_size
        attend = 4.0 * tokens * config.num_attention_heads * head_dim * keys
        # Context keys and the block's own keys are written, then read with the window.
        items = (rows * window + shape.num_query_tokens + 2 * tokens) * head_dim
        total += StepWork(0.0, float(items * item_bytes), context_keys + attend)
    num_bytes = _bytes(
        (head.main_proj, head.main_norm, head.norm, head.markov_head, head.confidence)
    )
    num_bytes += drafts * head.markov_embed.shape[1] * head.markov_embed.element_size()
    num_bytes += 2 * rows * weights.embed.shape[1] * item_bytes  # golden and noise token
    flops = 2.0 * shape.num_query_tokens * head.main_proj.numel()
    flops += 2.0 * tokens * weights.head.numel()
    flops += 2.0 * drafts * (head.markov_head.numel() + head.confidence.numel())
    return total + StepWork(float(num_bytes), 0.0, flops)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
