"""opcheck for every op of ours, over grid corners, strided inputs, and 0 and 1 rows; and C16.

Every op of the project's namespaces has a case: schema, fake and implementation are compared. The
ops of TileLang kernels run on CUDA alone; here the CPU gets an implementation for the time of a
test, the kernel's CPU form among them. Those of libraries are in test_opcheck_libraries.py.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import decodegrid.kernels
import decodegrid.kernels.providers
from decodegrid.kernels import native
from decodegrid.kernels.packed import num_scales
from decodegrid.kernels.providers.tile_ops import tile_op
from decodegrid.kernels.quant import quantise_fp8_rows, quantise_fp8_weight, quantise_q4x
from decodegrid.kernels.records import RecordFormat, encode_records, record_bytes
from decodegrid.kernels.tile.table import OPS as TILE_OPS
from decodegrid.kernels.tile.table import kernels as tile_kernels
from tests.gpu.cases import CASES as CASES_OF_KERNELS
from tests.kernels.providers.library_calls import CALLS

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


def import_kernels() -> None:
    """Every module that may define an op; kernels/tile holds kernels alone and needs TileLang."""
    for package in (decodegrid.kernels, decodegrid.kernels.providers):
        for item in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            importlib.import_module(item.name)


def test_no_op_is_left_out() -> None:
    """What the dispatcher knows of ours is what these tests visit; an op without a tensor, such
    as one that says what is installed, has nothing that a fake could get wrong."""
    import_kernels()
    known = {
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.split("::")[0].startswith("decodegrid")
        and "Tensor" in str(torch._C._get_schema(name, ""))
    }
    visited = {f"decodegrid::{op}" for op in CASES}
    visited |= {f"decodegrid_tile::{op.name}" for op in TILE_OPS}
    visited |= {
        f"{module.LIBRARY.ns}::{case.split(' ')[0]}" for case, (module, *_) in CALLS.items()
    }
    visited.add("decodegrid_experts::mega_moe")
    assert known == visited
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
def on_the_cpu() -> Iterator[Callable[[str, Any], Any]]:
    """on_the_cpu(name, call): the tile op of a name, which runs `call` for the CPU meanwhile."""
    with torch.library._scoped_library("decodegrid_tile", "FRAGMENT") as library:

        def bind(name: str, call: Any) -> Any:
            library.impl(name, call, "CPU")
            return tile_op(name)

        yield bind


def written(overload: Any) -> list[int]:
    """Places of the arguments that a schema marks as written."""
    return [
        place
        for place, item in enumerate(overload._schema.arguments)
        if item.alias_info is not None and item.alias_info.is_write
    ]


@pytest.mark.parametrize("name", [op.name for op in TILE_OPS])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_opcheck_of_our_cuda_kernels(name: str, rows: int, on_the_cpu: Any) -> None:
    """Tensors of any layout: the fake of an op that writes looks at none."""
    places = written(tile_op(name))

    def fill(*args: Any) -> None:
        for place in places:
            args[place].fill_(1)

    overload = on_the_cpu(name, fill)
    count = len(overload._schema.arguments) - 1
    assert places and min(places) > 0
    for make in (lambda x: x, strided, rows_strided):
        tensors = [make(torch.zeros(rows, 4)) for _ in range(count)]
        torch.library.opcheck(overload, ("kernel", *tensors), test_utils=IMPLEMENTED)


ONE_OF_EACH = {
    kernel.op: kernel
    for kernel in sorted(tile_kernels(), key=lambda kernel: kernel.model == "tiny")
}
"""A kernel of every op, at the embedded model's sizes where it has one."""


def test_every_tile_op_is_run_once() -> None:
    assert set(ONE_OF_EACH) == {op.name for op in TILE_OPS}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_what_kernels_write_is_what_their_schemas_say(
    name: str, on_the_cpu: Any, tile_route: Any
) -> None:
    """The kernel itself, as the CPU runs it, behind its op: an argument that it writes and the
    schema does not mark would fail, and so would one that is marked and never written."""
    kernel = ONE_OF_EACH[name]
    call, case = tile_route(kernel), CASES_OF_KERNELS[name](kernel.sizes)
    overload = on_the_cpu(name, lambda _, *tensors: call(*tensors))
    before = [tensor.clone() for tensor in case.tensors]
    torch.library.opcheck(overload, (kernel.name, *case.tensors), test_utils=IMPLEMENTED)
    overload(kernel.name, *case.tensors)
    changed = [
        place
        for place, (old, new) in enumerate(zip(before, case.tensors, strict=True), 1)
        if not same_bytes(old, new)
    ]
    assert changed == written(overload)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


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
