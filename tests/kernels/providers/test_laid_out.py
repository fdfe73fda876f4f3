"""Packed weights in a device's form and back: no bit changes, and plain torch reads both."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decodegrid.kernels.products import last_rows
from decodegrid.kernels.providers import laid_out
from decodegrid.kernels.step_kernels import PLAIN


def codes(*shape: int, seed: int = 0) -> Tensor:
    """E4M3 or E2M1 pairs, no NaN among the former."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return found.masked_fill_((found & 0x7F) == 0x7F, 3)


def scales(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randint(118, 126, shape, generator=generator, dtype=torch.uint8)


def same(left: object, right: list[Tensor]) -> bool:
    assert isinstance(left, list) and [part.dtype for part in left] == [torch.uint8] * 2
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("shape", [(64, 128), (96, 160), (3, 64, 256)])
def test_matrices(shape: tuple[int, ...]) -> None:
    """One, one whose last word of scales is not full, and a stack."""
    tiles = (*shape[:-2], shape[-2] // 32, shape[-1] // 32)
    weight = [codes(*shape), scales(*tiles)]
    packed = laid_out.pack([part.clone() for part in weight])
    assert not isinstance(packed, Tensor) and packed[1].dtype == torch.int32
    assert same(laid_out.stored(packed), weight)
    assert laid_out.stored(weight) is weight
    wide = laid_out.widen(weight)
    assert isinstance(wide, Tensor) and laid_out.stored(wide) is wide
    x = torch.randn(5, *shape[:-2], shape[-1])
    read = PLAIN.project if len(shape) == 2 else PLAIN.project_groups
    reads_any = laid_out.PLAIN_OF_ANY
    any_form = reads_any.project if len(shape) == 2 else reads_any.project_groups
    want = read(x, weight)
    assert want.abs().max() > 0
    assert torch.equal(any_form(x, packed), want)
    assert torch.equal(any_form(x, wide), read(x, wide))


def test_the_last_rows_of_a_packed_matrix() -> None:
    """As the drafter takes the keys' rows of a joined projection."""
    weight = [codes(128, 128), scales(4, 4)]
    x = torch.randn(2, 128)
    part = last_rows(laid_out.pack(weight), 64)
    want = PLAIN.project(x, [weight[0][64:], weight[1][2:]])
    assert torch.equal(laid_out.PLAIN_OF_ANY.project(x, part), want)


@pytest.fixture
def experts() -> tuple[list[Tensor], list[Tensor]]:
    """Three of 256 channels and 128 inner ones."""
    w13 = [codes(3, 256, 128), scales(3, 256, 8)]
    return w13, [codes(3, 256, 64, seed=1), scales(3, 256, 4)]


def test_experts(experts: tuple[list[Tensor], list[Tensor]]) -> None:
    """The fused kernel's order of rows and scales, undone."""
    w13, w2 = ([part.clone() for part in weight] for weight in experts)
    first, second = laid_out.fuse_experts(w13, w2)
    assert not isinstance(first, Tensor) and not isinstance(second, Tensor)
    assert not torch.equal(first[0].view(torch.uint8), experts[0][0]), "the order is another one"
    back = laid_out.stored_experts(first, second)
    assert same(back[0], experts[0]) and same(back[1], experts[1])
    x, ids = torch.randn(4, 256), torch.tensor([[0, 2], [1, 3], [2, 0], [3, 3]])
    weights = torch.rand(4, 2)
    run: Callable[..., Tensor] = laid_out.PLAIN_OF_ANY.run_experts
    want = PLAIN.run_experts(x, ids, weights, experts[0], experts[1], 10.0)
    assert torch.equal(run(x, ids, weights, first, second, 10.0), want) and want.abs().max() > 0
    assert torch.equal(run(x, ids, weights, experts[0], experts[1], 10.0), want)
