"""What a deployment holds in memory, tensor for tensor, before anything of it is allocated.

Owns the sums and the names of their parts. The tensors are those of the start itself: model, packed
weights, state, snapshots and buffers are made by the functions that make them at start-up, on
torch's meta device, where they take no memory. So nothing here repeats a shape.

Data flow: model config, capacity, settings -> tensors without memory -> `MemoryPlan`.

Not counted, because no tensor of the start holds it: what torch, CUDA and the libraries take for
themselves, intermediate results of a step, and buffers of an exchange between processes.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from decodegrid.engine.window_snapshots import WindowSnapshots
from decodegrid.graphs.checkpoint import WeightForm
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.packed_modules import pack_table, use_packed_modules
from decodegrid.graphs.state import Capacity, DecodeState, allocate_state
from decodegrid.graphs.step_buffers import StepBuffers, allocate_buffers
from decodegrid.graphs.step_weights import EXPERTS, MATRICES, LayerWeights, StepWeights
from decodegrid.graphs.weight_packing import pack_weights

WEIGHTS, KV_POOL, RINGS, COMPRESSORS, SLOTS, RICH, SNAPSHOTS, BUFFERS = POOLS = (
    "weights", "kv pool", "window rings", "compressor rings", "slots", "rich buffers",
    "window snapshots", "graph buffers",
)  # fmt: skip
"""What the parts of a plan belong to, in the order in which a start makes them."""

_SCALING = (Tensor.mul, Tensor.__mul__)

Place = Literal["device", "files"]
"""Where a part lies: on `model.device`, or mapped from the checkpoint's files."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Tensors of one kind."""

    pool: str
    """One of POOLS."""
    what: str
    num_bytes: int
    """Of the whole model or process."""
    divided_by: int = 1
    """Processes that hold equal shares of it."""
    place: Place = "device"

    @property
    def each(self) -> int:
        """Bytes of one process, rounded up."""
        return -(-self.num_bytes // self.divided_by)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All parts, and the tensors that graphs are bound to."""

    parts: tuple[MemoryPart, ...]
    buffers: StepBuffers
    """Without memory."""
    start_up_bytes: int
    """What a start needs beside them: the model as it is loaded, where steps have copies of their
    own. Given back once the engine is ready."""

    def pool_bytes(self, pool: str) -> int:
        """Bytes of one of POOLS on a device."""
        return sum(p.each for p in self.parts if p.pool == pool and p.place == "device")

    @property
    def total_bytes(self) -> int:
        """Bytes on a device, of one process."""
        return sum(self.pool_bytes(pool) for pool in POOLS)


@dataclass(frozen=True, slots=True)
class WeightSettings:
    """How weights lie in memory."""

    dtype: torch.dtype
    form: WeightForm
    storage: torch.dtype | None
    """What float matrices are narrowed to; None for `dtype`."""
    are_tables_mapped: bool
    num_processes: int = 1


def make_plan(
    model: ModelConfig,
    capacity: Capacity,
    settings: WeightSettings,
    max_chunk: int,
    num_snapshots: int,
) -> MemoryPlan:
    """The plan of a start.

    max_chunk: the largest prefill size. num_snapshots: windows that the prefix cache keeps, 0
    without one. Raises ValueError for packed weights that cannot be joined, and for sizes that no
    memory holds.
    """
    try:
        with torch.no_grad(), _ShapesAlone():
            loaded, weights = _weights(model, settings, with_drafter=capacity.num_draft_tokens > 0)
            state = allocate_state(model, capacity, settings.dtype, "meta")
            buffers = allocate_buffers(model, capacity, max_chunk, settings.dtype, "meta")
            parts = [
                *weight_parts(weights, settings),
                *state_parts(state, model),
                *buffer_parts(buffers),
            ]
            if num_snapshots:
                size = WindowSnapshots(model, state, num_snapshots).num_bytes
                parts.append(MemoryPart(SNAPSHOTS, "windows of all layers", size))
    except RuntimeError as error:  # torch's own word for more bytes than it can count
        raise ValueError(f"sizes that no memory holds: {_first_line(error)}") from None
    return MemoryPlan(tuple(parts), buffers, _copied_bytes(loaded, weights, settings))


class _ShapesAlone(TorchFunctionMode):
    """The two operations of packing that compute, on tensors without memory, by shape alone:
    torch's own forms of them load the compiler."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.cat and args[0][0].is_meta:
            tensors, dim = args[0], args[1] if len(args) > 1 else 0
            shape = list(tensors[0].shape)
            shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
            return tensors[0].new_empty(shape)
        if func in _SCALING and args[0].is_meta and not isinstance(args[1], Tensor):
            return args[0].new_empty(args[0].shape)
        return func(*args, **(kwargs or {}))


def _first_line(error: RuntimeError) -> str:
    return next(iter(str(error).splitlines()), "no reason given")


def _weights(
    config: ModelConfig, settings: WeightSettings, *, with_drafter: bool
) -> tuple[DraftModel, StepWeights]:
    """Model and step weights without memory, in the order of `load_model`."""
    with torch.device("meta"):
        model = DraftModel(config)
    if settings.are_tables_mapped and config.quantized:
        for layer in config.engram_layer_ids:
            pack_table(model, f"layers.{layer}.engram.embed")
    if settings.form != "expanded":
        use_packed_modules(model, settings.form)
    model.cast(settings.dtype)
    return model, pack_weights(model, with_drafter=with_drafter)


def weight_parts(weights: StepWeights, settings: WeightSettings) -> list[MemoryPart]:
    """Parts of the weights as steps read them."""
    sums: dict[tuple[str, bool], int] = {}
    for what, field, tensor in _named_weights(weights):
        key = what, field in EXPERTS or field == "table"
        sums[key] = sums.get(key, 0) + _weight_bytes(field, tensor, settings.storage)
    return [
        MemoryPart(
            WEIGHTS,
            what,
            num_bytes,
            settings.num_processes if is_divided else 1,
            "files" if what == "engram tables" and settings.are_tables_mapped else "device",
        )
        for (what, is_divided), num_bytes in sorted(sums.items(), key=lambda item: -item[1])
    ]


def _weight_bytes(field: str, tensor: Tensor, storage: torch.dtype | None) -> int:
    """Bytes of a weight as it is stored for steps; packed ones are integers and stay."""
    if storage is not None and field in MATRICES and tensor.is_floating_point():
        return tensor.numel() * storage.itemsize
    return tensor.nbytes


def _named_weights(weights: StepWeights) -> Iterator[tuple[str, str, Tensor]]:
    """(part, field, tensor) of every weight; parts are named as `decodegrid inspect` does."""
    yield "embedding and head", "embed", weights.embed
    yield "embedding and head", "head", weights.head
    yield "norms and mixers", "norm", weights.norm
    yield "norms and mixers", "compressed_ids", weights.compressed_ids
    for layer in weights.layers:
        yield from _layer_weights(layer)
    for layer in weights.draft_layers:
        for what, field, tensor in _layer_weights(layer):
            yield "drafter's experts" if what == "routed experts" else "drafter", field, tensor
    if weights.draft_head is not None:
        yield from (("drafter", *item) for item in _tensors(weights.draft_head))


def _layer_weights(layer: LayerWeights) -> Iterator[tuple[str, str, Tensor]]:
    by_part = (
        ("norms and mixers", (layer.attn_mix, layer.ffn_mix)),
        ("attention", (layer.attention, layer.source, layer.index)),
    )
    for what, parts in by_part:
        for part in parts:
            if part is not None:
                yield from ((what, *item) for item in _tensors(part))
    for field, tensor in _tensors(layer.moe):
        what = "routed experts" if field in EXPERTS else "shared experts and routers"
        yield what, field, tensor
    if layer.engram is not None:
        for field, tensor in _tensors(layer.engram):
            yield "engram tables" if field == "table" else "engram projections", field, tensor


def _tensors(part: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """(field, tensor) of everything in a dataclass, a list or a tuple, whatever its depth."""
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, list | tuple):
        for item in part:
            yield from _tensors(item, name)
    elif is_dataclass(part):
        for item in fields(part):
            yield from _tensors(getattr(part, item.name), item.name)


def _copied_bytes(model: DraftModel, weights: StepWeights, settings: WeightSettings) -> int:
    """Bytes of the loaded model that the steps' weights do not share."""
    kept = {
        _storage(tensor)
        for _, field, tensor in _named_weights(weights)
        if tensor.nbytes == _weight_bytes(field, tensor, settings.storage)
    }
    mapped = {
        f"layers.{layer}.engram.embed.{leaf}"
        for layer in model.config.engram_layer_ids
        for leaf in ("weight", "codes", "scales")
        if settings.are_tables_mapped
    }
    own: dict[int, int] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in mapped and _storage(tensor) not in kept:
            own[_storage(tensor)] = tensor.nbytes
    return sum(own.values())


def _storage(tensor: Tensor) -> int:
    """Identity of the memory that a tensor views; on the meta device it has no address."""
    return int(tensor.untyped_storage()._cdata)


def state_parts(state: DecodeState, config: ModelConfig) -> list[MemoryPart]:
    """Parts of the slot state and the pools."""
    sums: dict[tuple[str, str], int] = {}
    for name, tensor in state.tensors():
        key = _state_kind(name, config)
        sums[key] = sums.get(key, 0) + tensor.nbytes
    return [MemoryPart(pool, what, num_bytes) for (pool, what), num_bytes in sums.items()]


def _state_kind(name: str, config: ModelConfig) -> tuple[str, str]:
    """Pool and part of one of `DecodeState.tensors`."""
    first, *rest = name.split(".")
    if first == "slots":
        return SLOTS, "facts of the requests, block tables"
    if first == "rich":
        return RICH, "rows of the requests"
    layer = int(rest[0])
    if first == "window_rings":
        is_target = layer < config.num_hidden_layers
        return RINGS, "target layers" if is_target else "drafter layers"
    ratio = config.compress_ratios[layer]
    if rest[1] == "compressor":
        return COMPRESSORS, f"sources of ratio {ratio}"
    what = "compressed keys" if rest[1] == "keys" else "index keys"
    return KV_POOL, f"{what}, ratio {ratio}"


def buffer_parts(buffers: StepBuffers) -> list[MemoryPart]:
    """Parts of the static buffers that graphs are bound to."""
    by_part: tuple[tuple[str, str, Iterable[Any]], ...] = (
        (BUFFERS, "tokens of the target", (buffers.target,)),
        (
            BUFFERS,
            "drafter",
            (buffers.draft, buffers.draft_logits, buffers.draft_hidden, buffers.draft_previous),
        ),
        (BUFFERS, "logits", (buffers.output,)),
        (BUFFERS, "rows", (buffers.rows, buffers.draft_steps, buffers.total)),
        (
            BUFFERS,
            "prefill",
            (
                buffers.prefill, buffers.window_workspace, buffers.compressor_workspace,
                buffers.history_index, buffers.compressor_history,
            ),
        ),
        (BUFFERS, "bounded replay", (buffers.late,)),
        (RICH, "logits, masks, reports", (buffers.rich,)),
    )  # fmt: skip
    sizes = ((pool, what, total_bytes(parts)) for pool, what, parts in by_part)
    return [MemoryPart(pool, what, size) for pool, what, size in sizes if size]


def total_bytes(parts: Iterable[Any]) -> int:
    """Bytes of all tensors in dataclasses, lists and tensors; None has none."""
    return sum(tensor.nbytes for part in parts for _, tensor in _tensors(part))
