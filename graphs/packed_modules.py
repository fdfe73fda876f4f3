"""Modules that keep a quantised checkpoint's bytes and expand them when they are used.

Owns the packed forms of a projection, of stacked routed experts and of an Engram table, and the
exchange of a model's float modules for them. Bytes are uint8 buffers; there are no float
parameters. The forwards compute what the float modules compute on the expanded weights, to the
bit; fast products on packed weights are elsewhere.

Data flow: model (with or without memory) -> the same model with packed modules; bytes -> values in
the compute dtype on each use.

Source: DeepSeek-V4.1-Flash `inference/model.py` (Linear with a scale), `inference/engram.py`.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decodegrid.graphs.quant_layout import (
    StoredKind,
    expand,
    expand_piece,
    quantise,
    stored_kind,
    stored_shapes,
)

Packing = Literal["packed_experts", "packed"]
"""What stays packed: the routed experts alone, or every quantised weight and table."""


class PackedModule(nn.Module):
    """Weights as stored bytes."""

    dtype: torch.dtype = torch.float32
    """Dtype that the weights expand to; `Model.cast` sets it."""

    def add_bytes(self, name: str, shape: tuple[int, ...], device: torch.device | None) -> None:
        """Register a uint8 buffer; without values, which whoever fills the module writes."""
        self.register_buffer(name, torch.empty(shape, dtype=torch.uint8, device=device))


class PackedLinear(PackedModule):
    """A projection without bias, E4M3 with one E8M0 scale per 32 x 32 tile."""

    codes: Tensor
    """(out, in) uint8."""
    scales: Tensor
    """(ceil(out / 32), ceil(in / 32)) uint8."""

    def __init__(
        self, in_features: int, out_features: int, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        codes, scales = stored_shapes(StoredKind.FP8_TILES, (out_features, in_features))
        self.add_bytes("codes", codes, device)
        self.add_bytes("scales", scales, device)

    @property
    def weight(self) -> Tensor:
        """(out, in) in `dtype`, made anew."""
        return expand(StoredKind.FP8_TILES, self.codes, self.scales, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return F.linear(x, self.weight)


class PackedExperts(PackedModule):
    """Routed experts stacked: E2M1 pairs along the inputs, one E8M0 scale per 32 inputs."""

    w1_codes: Tensor
    """(E, I, D / 2) uint8, gate."""
    w1_scales: Tensor
    """(E, I, D / 32) uint8."""
    w3_codes: Tensor
    """As w1, up."""
    w3_scales: Tensor
    w2_codes: Tensor
    """(E, D, I / 2) uint8, down."""
    w2_scales: Tensor
    """(E, D, I / 32) uint8."""

    def __init__(
        self, num_experts: int, hidden_size: int, inner: int, device: torch.device | None = None
    ) -> None:
        super().__init__()
        up, down = (num_experts, inner, hidden_size), (num_experts, hidden_size, inner)
        for name, shape in (("w1", up), ("w3", up), ("w2", down)):
            codes, scales = stored_shapes(StoredKind.MXFP4, shape)
            self.add_bytes(f"{name}_codes", codes, device)
            self.add_bytes(f"{name}_scales", scales, device)

    def packed(self) -> tuple[Tensor, Tensor]:
        """Weights as the grouped product wants them, expanded to `dtype` expert by expert:
        (E, D, 2 * I) gate first, and (E, I, D)."""
        experts, inner, _ = self.w1_codes.shape
        hidden = self.w2_codes.shape[1]
        w13 = self.w1_codes.new_empty(experts, 2 * inner, hidden, dtype=self.dtype)
        w2 = self.w1_codes.new_empty(experts, hidden, inner, dtype=self.dtype)
        for expert in range(experts):
            for target, name in (
                (w13[expert, :inner], "w1"),
                (w13[expert, inner:], "w3"),
                (w2[expert], "w2"),
            ):
                codes, scales = getattr(self, f"{name}_codes"), getattr(self, f"{name}_scales")
                target.copy_(expand_piece(StoredKind.MXFP4, codes[expert], scales[expert]))
        return w13.transpose(1, 2), w2.transpose(1, 2)


class PackedTable(PackedModule):
    """Engram rows of one layer, E4M3 with one E8M0 scale per 32 channels of a row.

    The buffers may be mapped from a file; a lookup reads the rows that it names.
    """

    codes: Tensor
    """(rows, dim) uint8."""
    scales: Tensor
    """(rows, dim / 32) uint8."""

    def __init__(self, rows: int, dim: int, device: torch.device | None = None) -> None:
        super().__init__()
        codes, scales = stored_shapes(StoredKind.FP8_ROWS, (rows, dim))
        self.add_bytes("codes", codes, device)
        self.add_bytes("scales", scales, device)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Table rows: index (...) int64 -> (..., dim) in `dtype`."""
        return expand_piece(StoredKind.FP8_ROWS, self.codes[index], self.scales[index]).to(dtype)


def use_packed_modules(model: nn.Module, which: Packing) -> None:
    """Exchange the quantised weights' modules of a float `model` for packed ones, in place.

    "packed_experts" packs routed experts, "packed" projections and Engram tables too. Weights that
    have memory are quantised; on the meta device the bytes have none either. Raises ValueError
    where a weight does not fit its format.
    """
    for name, module in list(model.named_modules()):
        packed = _packed_form(name, module, which)
        if packed is not None:
            _exchange(model, name, packed)


def pack_table(model: nn.Module, name: str) -> None:
    """Exchange one Engram table, the module `name`, as `use_packed_modules` does."""
    packed = _packed_form(name, model.get_submodule(name), "packed")
    if not isinstance(packed, PackedTable):
        raise ValueError(f"{name} is not a float Engram table")
    _exchange(model, name, packed)


def _exchange(model: nn.Module, name: str, packed: PackedModule) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, packed)


def _packed_form(name: str, module: nn.Module, which: Packing) -> PackedModule | None:
    """The packed module for a float one, or None for a module that stays as it is."""
    if isinstance(module, PackedModule):
        return None
    if name.endswith(".ffn.experts"):
        return _pack_experts(module)
    kind = stored_kind(f"{name}.weight")
    if which == "packed_experts" or kind is StoredKind.FLOAT:
        return None
    weight = module.get_parameter("weight").detach()
    rows, columns = weight.shape
    packed = (
        PackedLinear(columns, rows, weight.device)
        if kind is StoredKind.FP8_TILES
        else PackedTable(rows, columns, weight.device)
    )
    packed.dtype = weight.dtype
    if not weight.is_meta:
        blocks = quantise(kind, weight)
        packed.codes, packed.scales = blocks.codes, blocks.scales
    return packed


def _pack_experts(module: nn.Module) -> PackedExperts:
    first = module.get_parameter("w1").detach()
    experts, inner, hidden = first.shape
    packed = PackedExperts(experts, hidden, inner, first.device)
    packed.dtype = first.dtype
    if first.is_meta:
        return packed
    for name in ("w1", "w3", "w2"):
        weight = module.get_parameter(name).detach()
        for expert in range(experts):
            blocks = quantise(StoredKind.MXFP4, weight[expert])
            getattr(packed, f"{name}_codes")[expert] = blocks.codes
            getattr(packed, f"{name}_scales")[expert] = blocks.scales
    return packed
