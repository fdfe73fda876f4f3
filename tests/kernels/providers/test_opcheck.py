"""opcheck for every op of ours, over grid corners, strided inputs, and 0 and 1 rows; and C16.

Every op that the registry knows has a case here: schema, fake and implementation are compared. The
ops of libraries and of TileLang kernels run on CUDA alone; for those the CPU gets an implementation
that fills what is written, in a library of the test's own, so that schema and fake are seen.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from decodegrid.kernels import native
from decodegrid.kernels.packed import num_scales
from decodegrid.kernels.providers.tile_ops import tile_op
from decodegrid.kernels.quant import quantise_fp8_rows, quantise_fp8_weight, quantise_q4x
from decodegrid.kernels.records import RecordFormat, encode_records, record_bytes
from decodegrid.kernels.tile.table import OPS as TILE_OPS

pytestmark = pytest.mark.kernels

IMPLEMENTED = ("test_schema", "test_faketensor", "test_autograd_registration")
ROWS = (0, 1, 2, 48)
"""No row, one, the least symbolic size, and a large step."""
VOCAB, DIM, EXPERTS = 64, 32, 3


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(seed: int, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def strided(tensor: Tensor) -> Tensor:
    """The same values with gaps in every axis."""
    wide = tensor.new_zeros(*tensor.shape, 2)
    wide[..., 0] = tensor
    return wide[..., 0]


def rows_strided(tensor: Tensor) -> Tensor:
    """The same values with a gap between rows and a dense last axis."""
    wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 4)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def sampling_rows(rows: int) -> tuple[Tensor, ...]:
    heat = draw(2, rows).abs()
    heat[::2] = 0.0
    return heat, draw(3, rows).sigmoid(), ints(4, 9, rows), draw(5, rows).sigmoid() / 10


def linear(rows: int) -> tuple[Any, ...]:
    return draw(1, rows, DIM), draw(2, 24, DIM)


def grouped_linear(rows: int) -> tuple[Any, ...]:
    return draw(1, rows, 2, DIM), draw(2, 2, 24, DIM)


def packed_linear(rows: int) -> tuple[Any, ...]:
    blocks = quantise_fp8_weight(draw(2, 48, DIM))
    return draw(1, rows, DIM), blocks.codes, blocks.scales


def packed_grouped_linear(rows: int) -> tuple[Any, ...]:
    parts = [quantise_fp8_weight(draw(seed, 32, DIM)) for seed in (2, 3)]
    return (
        draw(1, rows, 2, DIM), torch.stack([part.codes for part in parts]),
        torch.stack([part.scales for part in parts]),
    )  # fmt: skip


def packed_rows(rows: int) -> tuple[Any, ...]:
    blocks = quantise_fp8_rows(draw(2, 50, 2 * DIM))
    return ints(1, 50, rows, 3), blocks.codes, blocks.scales


def routing(rows: int) -> tuple[Tensor, Tensor]:
    """Expert ids, "no expert" among them, and weights."""
    return ints(1, EXPERTS + 1, rows, 2), draw(2, rows, 2).abs()


def routed_experts(rows: int) -> tuple[Any, ...]:
    w13, w2 = draw(3, EXPERTS, DIM, 2 * DIM), draw(4, EXPERTS, DIM, DIM)
    return draw(5, rows, DIM), *routing(rows), w13, w2, 1.5


def packed_experts(rows: int) -> tuple[Any, ...]:
    w13, w2 = (quantise_q4x(draw(s, EXPERTS, n, DIM)) for s, n in ((3, 2 * DIM), (4, DIM)))
    return draw(5, rows, DIM), *routing(rows), w13.codes, w13.scales, w2.codes, w2.scales, 1.5


def select_entries(rows: int) -> tuple[Any, ...]:
    lengths = ints(1, 40, rows)
    slots = ints(2, 3, rows).sort().values
    return (
        draw(3, rows, 4, DIM), draw(4, rows, 4), draw(5, 200, DIM), ints(6, 12, 3, 5), slots,
        lengths, 1, 16, 1, 2, 2, torch.zeros(rows, 80, dtype=torch.bool),
        torch.full((rows, 6), 7),
    )  # fmt: skip


def take_records(rows: int) -> tuple[Any, ...]:
    pool = encode_records(draw(1, 30, DIM), RecordFormat.Q4N)
    return pool, ints(2, 30, rows, 5) - 1, int(RecordFormat.Q4N), DIM, torch.float32


CASES: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "linear": linear,
    "grouped_linear": grouped_linear,
    "packed_linear": packed_linear,
    "packed_grouped_linear": packed_grouped_linear,
    "packed_rows": packed_rows,
    "routed_experts": routed_experts,
    "packed_experts": packed_experts,
    "select_entries": select_entries,
    "sinkhorn": lambda rows: (draw(1, rows, 4, 4), 20, 1e-6),
    "gumbel_noise": lambda rows: (*(ints(s, 9, rows) for s in (1, 2)), draw(3, rows), VOCAB),
    "uniform_noise": lambda rows: (ints(1, 9, rows), ints(2, 99, rows)),
    "filter_logits": lambda rows: (draw(1, rows, VOCAB), *sampling_rows(rows)),
    "top_logits": lambda rows: (draw(1, rows, VOCAB), ints(2, 2, rows) > 0, 5),
    "encode_records": lambda rows: (draw(1, rows, DIM), int(RecordFormat.Q8)),
    "round_records": lambda rows: (draw(1, rows, 2, DIM), int(RecordFormat.Q4X)),
    "take_records": take_records,
}  # fmt: skip
DENSE_LAST = {
    "packed_linear", "packed_grouped_linear", "packed_rows", "packed_experts", "routed_experts",
}  # fmt: skip
"""Weights of these have a dense axis: codes are read bytes at a time, and torch's grouped product
takes no other."""


def test_every_op_of_a_step_has_a_case() -> None:
    assert set(CASES) == set(native.OPS)
    assert record_bytes(RecordFormat.Q8, DIM) == DIM + 1 and num_scales(48) == 2


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("layout", ["dense", "strided"])
def test_opcheck(op: str, rows: int, layout: str) -> None:
    args = CASES[op](rows)
    if layout == "strided":
        gap = rows_strided if op in DENSE_LAST else strided
        args = tuple(gap(a) if isinstance(a, Tensor) else a for a in args)
    overload = getattr(torch.ops.decodegrid, op).default
    torch.library.opcheck(overload, args, test_utils=IMPLEMENTED)


@pytest.fixture
def filled() -> Iterator[Callable[[str], Any]]:
    """filled(op): the schema of a tile op under another name, with an implementation for the CPU
    that writes ones into all that the schema says is written."""
    with torch.library._scoped_library("decodegrid_opcheck", "FRAGMENT") as library:

        def make(name: str) -> Any:
            schema = tile_op(name)._schema
            written = [
                place
                for place, item in enumerate(schema.arguments)
                if item.alias_info is not None and item.alias_info.is_write
            ]
            (text,) = [op.schema for op in TILE_OPS if op.name == name]
            library.define(f"{name}(str kernel, {text}) -> ()")

            def fill(*args: Any) -> None:
                for place in written:
                    args[place].fill_(1)

            library.impl(name, fill, "CPU")
            fake = torch._library.simple_registry.singleton.find(f"decodegrid_tile::{name}")
            torch.library.register_fake(
                f"decodegrid_opcheck::{name}", fake.fake_impl.kernel.func, lib=library
            )
            return getattr(torch.ops.decodegrid_opcheck, name).default, written

        yield make


@pytest.mark.parametrize("name", [op.name for op in TILE_OPS])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_opcheck_of_our_cuda_kernels(name: str, rows: int, filled: Callable[[str], Any]) -> None:
    """What the schema marks as written is what is written, and nothing comes back."""
    overload, written = filled(name)
    tensors = [torch.zeros(rows, 4) for item in overload._schema.arguments if item.name != "kernel"]
    torch.library.opcheck(overload, ("kernel", *tensors), test_utils=IMPLEMENTED)
    assert written and max(written) <= len(tensors)


def double(rows: Tensor) -> Tensor:
    return rows * 2


@pytest.fixture
def planted() -> Iterator[Any]:
    """An op whose fake gives one row too many."""
    with torch.library._scoped_library("decodegrid_planted", "FRAGMENT") as library:
        library.define("double(Tensor rows) -> Tensor")
        library.impl("double", double, "CPU")
        torch.library.register_fake(
            "decodegrid_planted::double",
            lambda rows: rows.new_empty(rows.shape[0] + 1, rows.shape[1]),
            lib=library,
        )
        yield torch.ops.decodegrid_planted.double.default
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_c16_compiling_does_not_see_a_wrong_fake(planted: Any, backend: str) -> None:
    """These run the op itself and believe the fake's shape in silence."""
    torch.compiler.reset()
    rows = draw(1, 3, 4)
    found = torch.compile(lambda x: planted(x) + 1, backend=backend, fullgraph=True)(rows)
    assert torch.equal(found, rows * 2 + 1)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_c16_our_check_sees_a_wrong_fake(planted: Any, rows: int) -> None:
    with pytest.raises(Exception, match=r"(?i)shape|size"):
        torch.library.opcheck(planted, (draw(1, rows, 4),), test_utils=IMPLEMENTED)
