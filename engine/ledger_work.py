"""The least work of a captured graph: bytes that must be read or written, and operations.

Owns the counting rules; measures nothing. Counted are weights (each once, in the form in which they
are stored; of routed experts and tables only what the tokens touch) and state (rings and pools: the
live length, never the capacity). Not counted are activations between regions, pads, and integer
bookkeeping, so that a measured step can only be slower than the floor. One multiply-add counts as 2
operations; only products count.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from torch import Tensor

from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.state import DecodeState
from decodegrid.graphs.step_weights import LayerWeights, StepWeights
from decodegrid.kernels.products import Matrix


@dataclass(frozen=True, slots=True)
class StepShape:
    """The live sizes of a decode step."""

    num_reqs: int
    num_query_tokens: int
    context: int
    """Committed tokens of each request."""
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """Bytes and operations of one replay."""

    weight_bytes: float
    state_bytes: float
    flops: float

    def __add__(self, other: "StepWork") -> "StepWork":
        return StepWork(
            self.weight_bytes + other.weight_bytes,
            self.state_bytes + other.state_bytes,
            self.flops + other.flops,
        )

    @property
    def num_bytes(self) -> float:
        """Of weights and state."""
        return self.weight_bytes + self.state_bytes

    def floor_seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The roofline: the longer of moving the bytes and doing the operations."""
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s)


@dataclass(frozen=True, slots=True)
class KeyBytes:
    """Bytes of one cached row."""

    window: int
    """Of a window ring."""
    entry: int
    """Of a pool: the key of a compressed entry."""
    index: int
    """Of a pool: its index key."""

    @classmethod
    def of_state(cls, state: DecodeState) -> "KeyBytes":
        """As the rings and pools of an engine hold them."""
        pool = next(iter(state.pools.values()), None)
        if pool is None:
            return cls(_row_bytes(state.window_rings[0]), 0, 0)
        return cls(
            _row_bytes(state.window_rings[0]), _row_bytes(pool.keys), _row_bytes(pool.index_keys)
        )

    @classmethod
    def of_model(cls, config: ModelConfig, item_bytes: int) -> "KeyBytes":
        """Keys in the model's own dtype of `item_bytes`."""
        dim = config.head_dim * item_bytes
        return cls(dim, dim, config.index_head_dim * item_bytes)


@dataclass(frozen=True, slots=True)
class Span:
    """Adjacent tokens of one request in a step."""

    start: int
    """Position of the first: tokens of the text before it."""
    count: int

    @property
    def end(self) -> int:
        """Tokens of the text, these included."""
        return self.start + self.count

    def keys_seen(self, limit: int) -> int:
        """Window keys that the tokens see, their own included, over all of them."""
        short = max(0, min(self.end, limit) - self.start)
        first = self.start + 1
        return short * (2 * first + short - 1) // 2 + (self.count - short) * limit

    def entries_seen(self, ratio: int, limit: int | None = None) -> int:
        """Compressed entries that the tokens see, at most `limit` each, over all of them."""
        seen = ((position + 1) // ratio for position in range(self.start, self.end))
        return sum(seen) if limit is None else sum(min(entries, limit) for entries in seen)


def experts_touched(num_experts: int, per_token: int, num_tokens: int) -> float:
    """Expected number of different experts when every token draws `per_token` at random."""
    return num_experts * (1.0 - (1.0 - per_token / num_experts) ** num_tokens)


def step_work(
    weights: StepWeights, config: ModelConfig, shape: StepShape, keys: KeyBytes | None = None
) -> StepWork:
    """Work of one decode step with these weights; the drafter's part where they have one.

    keys: None for keys in the model's dtype.
    """
    item_bytes = weights.embed.element_size()
    keys = KeyBytes.of_model(config, item_bytes) if keys is None else keys
    least, more = divmod(shape.num_query_tokens, shape.num_reqs)
    # The first query token of a request is its last committed one.
    spans = [Span(shape.context - 1, least + (row < more)) for row in range(shape.num_reqs)]
    total = _layers_work(weights, config, spans, keys)
    total += _ends_work(weights, shape.num_query_tokens)
    if weights.draft_head is not None:
        total += _draft_work(weights, config, shape, keys)
    return total


def prefill_work(weights: StepWeights, config: ModelConfig, span: Span, keys: KeyBytes) -> StepWork:
    """Work of one chunk of a prompt: no head, no choice; the drafter gets its context."""
    total = _layers_work(weights, config, [span], keys)
    embed = span.count * _row_bytes(weights.embed)
    total += StepWork(float(embed), 0.0, 0.0)
    if weights.draft_head is not None:
        total += _draft_context_work(weights, config, span.count, keys, with_weights=True)
    return total


def report_work(weights: StepWeights, num_tokens: int) -> StepWork:
    """Work of the log-probabilities of a chunk: the head, and nothing else."""
    return StepWork(
        float(_bytes((weights.norm, weights.head))), 0.0, 2.0 * num_tokens * weights.head.numel()
    )


def _layers_work(
    weights: StepWeights, config: ModelConfig, spans: list[Span], keys: KeyBytes
) -> StepWork:
    """All target layers."""
    num_tokens = sum(span.count for span in spans)
    total = StepWork(0.0, 0.0, 0.0)
    for index, layer in enumerate(weights.layers):
        total += layer_weight_work(
            layer, config.num_experts_per_tok, num_tokens, config.engram_columns
        )
        total += target_attention_work(config, index, spans, keys)
    return total


def layer_weight_work(
    layer: LayerWeights, experts_per_token: int, num_tokens: int, engram_columns: int
) -> StepWork:
    """One layer's projections, experts and table rows for `num_tokens` tokens."""
    matrices, rest = layer_tensors(layer)
    moe = layer.moe
    num_experts = _parts(moe.w13)[0].shape[0]
    expert_size = (_num_weights(moe.w13, packed=2) + _num_weights(moe.w2, packed=2)) / num_experts
    expert_bytes = (_matrix_bytes(moe.w13) + _matrix_bytes(moe.w2)) / num_experts
    touched = experts_touched(num_experts, experts_per_token, num_tokens)
    num_bytes = sum(map(_matrix_bytes, matrices)) + _bytes(rest) + touched * expert_bytes
    if layer.engram is not None:
        row = sum(map(_row_bytes, _parts(layer.engram.table)))
        num_bytes += num_tokens * engram_columns * row
    size = sum(_num_weights(matrix, packed=1) for matrix in matrices)
    flops = 2.0 * num_tokens * (size + experts_per_token * expert_size)
    return StepWork(num_bytes, 0.0, flops)


def layer_tensors(layer: LayerWeights) -> tuple[list[Matrix], list[Tensor]]:
    """(matrices that every token multiplies once, small tensors); without experts and tables."""
    attention, moe = layer.attention, layer.moe
    matrices: list[Matrix] = [
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
    config: ModelConfig, index: int, spans: list[Span], keys: KeyBytes
) -> StepWork:
    """Attention and index selection of one target layer over its live keys."""
    window, num_tokens = config.sliding_window, sum(span.count for span in spans)
    # The window before the tokens is read; their own keys are written, then read.
    num_bytes = keys.window * (sum(min(span.start, window) for span in spans) + 2 * num_tokens)
    num_keys, flops = sum(span.keys_seen(window) for span in spans), 0.0
    ratio = config.compress_ratios[index]
    if ratio:
        num_keys += sum(span.entries_seen(ratio, config.index_topk) for span in spans)
        num_bytes += keys.entry * sum(min(span.end // ratio, config.index_topk) for span in spans)
        if index in config.kv_source_layer_ids:
            num_bytes += num_tokens * (keys.entry + keys.index) // ratio
        for span in spans:
            if index in config.index_source_layer_ids and _scores(config, index, span.end // ratio):
                num_bytes += span.end // ratio * keys.index
                seen = span.entries_seen(ratio)
                flops += 2.0 * seen * config.index_n_heads * (config.index_head_dim + 1)
    flops += 4.0 * config.num_attention_heads * config.head_dim * num_keys
    return StepWork(0.0, float(num_bytes), flops)


def _scores(config: ModelConfig, index: int, entries: int) -> bool:
    """Whether the selection needs scores: more than fit, or candidate blocks to write or read."""
    source = config.candidate_source_layer_id
    return entries > config.index_topk or (source is not None and index >= source)


def _ends_work(weights: StepWeights, num_tokens: int) -> StepWork:
    """Embedding rows, the last norm and the head."""
    num_bytes = num_tokens * _row_bytes(weights.embed) + _bytes((weights.norm, weights.head))
    return StepWork(float(num_bytes), 0.0, 2.0 * num_tokens * weights.head.numel())


def _draft_context_work(
    weights: StepWeights,
    config: ModelConfig,
    num_tokens: int,
    keys: KeyBytes,
    *,
    with_weights: bool,
) -> StepWork:
    """Context keys of the tokens in the drafter's rings; with_weights: of its layers, too."""
    head, num_layers = weights.draft_head, len(weights.draft_layers)
    assert head is not None
    width = config.head_dim * config.hidden_size
    num_bytes: float = _matrix_bytes(head.main_proj) + _bytes((head.main_norm,))
    if with_weights:
        for layer in weights.draft_layers:
            rows = layer.attention.q_norm.shape[0] + config.head_dim
            num_bytes += _matrix_bytes(layer.attention.w_in) * config.head_dim / rows
    flops = 2.0 * num_tokens * (_num_weights(head.main_proj, packed=1) + num_layers * width)
    return StepWork(num_bytes, float(num_layers * num_tokens * keys.window), flops)


def _draft_work(
    weights: StepWeights, config: ModelConfig, shape: StepShape, keys: KeyBytes
) -> StepWork:
    """Context keys of the query tokens, then one block for each request, head and Markov chain."""
    head = weights.draft_head
    assert head is not None
    rows = shape.num_reqs
    tokens, drafts = rows * config.dspark_block_size, rows * shape.num_draft_tokens
    total = _draft_context_work(weights, config, shape.num_query_tokens, keys, with_weights=False)
    window = min(shape.context, config.sliding_window)
    for layer in weights.draft_layers:
        total += layer_weight_work(
            layer, config.dspark_num_experts_per_tok, tokens, config.engram_columns
        )
        num_keys = tokens * (window + config.dspark_block_size)
        attend = 4.0 * config.num_attention_heads * config.head_dim * num_keys
        # The block's own keys are written, then read with the window.
        total += StepWork(0.0, float((rows * window + 2 * tokens) * keys.window), attend)
    num_bytes = _bytes((head.norm, head.markov_head, head.confidence))
    num_bytes += drafts * _row_bytes(head.markov_embed)
    num_bytes += 2 * rows * _row_bytes(weights.embed)  # golden and noise token
    flops = 2.0 * tokens * weights.head.numel()
    flops += 2.0 * drafts * (head.markov_head.numel() + head.confidence.numel())
    return total + StepWork(float(num_bytes), 0.0, flops)


def _parts(matrix: Matrix) -> list[Tensor]:
    """The tensor, or codes and scales."""
    return [matrix] if isinstance(matrix, Tensor) else matrix


def _num_weights(matrix: Matrix, *, packed: int) -> int:
    """Weights of a matrix; packed: of one byte of codes, where it has codes."""
    if isinstance(matrix, Tensor):
        return matrix.numel()
    return matrix[0].numel() * packed


def _matrix_bytes(matrix: Matrix) -> int:
    return _bytes(_parts(matrix))


def _row_bytes(table: Tensor) -> int:
    return table.shape[1] * table.element_size()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
