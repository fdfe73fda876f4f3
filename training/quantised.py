"""Rounding of weights and cache records to the stored formats, for training and for export.

Owns which parameters a quantised checkpoint rounds, the rounding as arithmetic on floats, and its
use in training: values are rounded, gradients pass straight through. Does not own codes or scales;
`decodegrid.kernels.quant` has those, and a test holds every value here against it. Rounding twice
gives the same values as rounding once, so a float checkpoint of rounded weights loses nothing when
it is quantised.

Data flow: parameter -> rounded values while `rounded_weights` is entered, the own values after it;
activation -> `round_record` at the places where a V4.1 cache rounds.

Source: DeepSeek-V4.1-Flash `inference/kernel.py`; formats of `decodegrid.kernels.quant`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decodegrid.kernels.quant import E2M1_MAX, E4M3_MAX, Q4N_BLOCK, Q4X_BLOCK, Q8_BLOCK

_TILE = 32
_Q8_FLOOR = 1e-4
_Q4X_FLOOR = E2M1_MAX * 2.0**-126
_Q4N_FLOOR = E2M1_MAX * 2.0**-9
_EXPONENT_BITS, _MANTISSA_BITS = 0x7F800000, 0x7FFFFF


class WeightFormat(Enum):
    """How a quantised checkpoint stores a matrix."""

    FP8_TILES = "fp8_tiles"
    FP8_ROWS = "fp8_rows"
    MXFP4 = "mxfp4"


_TILE_ENDINGS = (
    "attn.wq_a.weight",
    "attn.wq_b.weight",
    "attn.wkv.weight",
    "attn.wo_a.weight",
    "attn.wo_b.weight",
    "indexer.wq_b.weight",
    "shared_experts.w1.weight",
    "shared_experts.w2.weight",
    "shared_experts.w3.weight",
    "engram.wkv.weight",
    "main_proj.weight",
)
_MXFP4_ENDINGS = (".experts.w1", ".experts.w2", ".experts.w3")


def weight_format(name: str) -> WeightFormat | None:
    """Format of a parameter of `DraftModel` by its name; None: it stays as it is."""
    if name.endswith(_TILE_ENDINGS):
        return WeightFormat.FP8_TILES
    if name.endswith(_MXFP4_ENDINGS):
        return WeightFormat.MXFP4
    return WeightFormat.FP8_ROWS if name.endswith("engram.embed.weight") else None


def _power_of_two(x: Tensor) -> Tensor:
    """2 ** floor(log2(|x|)) of normal float32 values; 0 of zeros and subnormals."""
    return (x.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 value, ties to even, after a clamp to +-448. x: float32."""
    x = x.clamp(-E4M3_MAX, E4M3_MAX)
    step = (_power_of_two(x) * 0.125).clamp_(min=2.0**-9)
    return (x / step).round_().mul_(step)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code, after a
    clamp to +-6. x: float32."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    step = (_power_of_two(x) * 0.5).clamp_(min=0.5)
    return (x / step).round_().mul_(step)


def _scale_up(amax: Tensor, floor: float, largest: float) -> Tensor:
    """2 ** ceil(log2(amax / largest)), amax being at least `floor`."""
    ratio = amax.clamp(min=floor) * torch.tensor(1.0 / largest)
    power = _power_of_two(ratio)
    return torch.where(ratio.view(torch.int32) & _MANTISSA_BITS != 0, power * 2.0, power)


def _blocks(x: Tensor, size: int) -> Tensor:
    if x.shape[-1] % size:
        raise ValueError(f"last axis has {x.shape[-1]} channels; must be a multiple of {size}")
    return x.unflatten(-1, (-1, size))


def round_q8(x: Tensor) -> Tensor:
    """E4M3 with one power of two per 32 channels: window keys, Engram tables. (..., D) float32."""
    blocks = _blocks(x, Q8_BLOCK)
    scale = _scale_up(blocks.abs().amax(-1, keepdim=True), _Q8_FLOOR, E4M3_MAX)
    return (round_e4m3(blocks / scale) * scale).flatten(-2)


def round_q4x(x: Tensor) -> Tensor:
    """E2M1 with one power of two per 32 channels: index queries and keys, MXFP4 weights."""
    blocks = _blocks(x, Q4X_BLOCK)
    scale = _scale_up(blocks.abs().amax(-1, keepdim=True), _Q4X_FLOOR, E2M1_MAX)
    return (round_e2m1(blocks / scale) * scale).flatten(-2)


def round_q4n(x: Tensor) -> Tensor:
    """E2M1 with one E4M3 scale per 16 channels: compressed keys."""
    blocks = _blocks(x, Q4N_BLOCK)
    scale = round_e4m3(blocks.abs().amax(-1, keepdim=True).clamp(min=_Q4N_FLOOR) / E2M1_MAX)
    return (round_e2m1(blocks / scale) * scale).flatten(-2)


def round_tiles(weight: Tensor) -> Tensor:
    """E4M3 with one power of two per tile of 32 x 32; (out, in) float32, any sizes."""
    out, columns = weight.shape
    padded = F.pad(weight, (0, -columns % _TILE, 0, -out % _TILE))
    tiles = padded.unflatten(1, (-1, _TILE)).unflatten(0, (-1, _TILE))
    scale = _scale_up(tiles.abs().amax((1, 3), keepdim=True), _Q8_FLOOR, E4M3_MAX)
    return (round_e4m3(tiles / scale) * scale).view(padded.shape)[:out, :columns].contiguous()


_ROUNDING: dict[WeightFormat, Callable[[Tensor], Tensor]] = {
    WeightFormat.FP8_TILES: round_tiles,
    WeightFormat.FP8_ROWS: round_q8,
    WeightFormat.MXFP4: round_q4x,
}


@torch.no_grad()
def stored_values(name: str, weight: Tensor) -> Tensor:
    """Values that a quantised checkpoint holds for a parameter: its bfloat16 form, rounded."""
    kind = weight_format(name)
    if kind is None:
        return weight
    return _ROUNDING[kind](weight.to(torch.bfloat16).to(torch.float32)).to(weight.dtype)


@torch.no_grad()
def round_in_place(model: nn.Module) -> None:
    """Give every parameter with a format its stored values."""
    for name, parameter in model.named_parameters():
        if weight_format(name) is not None:
            parameter.copy_(stored_values(name, parameter))


@contextmanager
def rounded_weights(named: list[tuple[str, nn.Parameter]]) -> Iterator[None]:
    """Within, parameters hold their stored values; forward and backward both belong inside.

    Gradients are those of the rounded values, kept for the own ones: straight through.
    """
    own = {name: parameter.data for name, parameter in named if weight_format(name) is not None}
    try:
        for name, parameter in named:
            if name in own:
                parameter.data = stored_values(name, parameter.data)
        yield
    finally:
        for name, parameter in named:
            if name in own:
                parameter.data = own[name]


class _Straight(torch.autograd.Function):
    """Rounded values, the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(x.to(torch.float32)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def round_record(x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """What a cache gives back for `x`; `rounding` is `round_q8`, `round_q4n` or `round_q4x`."""
    rounded: Tensor = _Straight.apply(x, rounding)
    return rounded
