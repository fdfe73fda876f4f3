"""opcheck for the ops around libraries, at 0, 1 and more rows and with gaps in what they take.

The libraries run on CUDA alone. Here the CPU gets the wrappers themselves for the time of a test,
around stand-ins that write and return what the libraries' documentation says: a schema that leaves
out something written, or a fake of another shape or layout, fails.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from decodegrid.kernels.providers import deep_gemm_experts, layouts
from decodegrid.kernels.providers.wrapper import KernelArgumentError, Wrapper
from tests.kernels.providers.library_calls import (
    BF16,
    CALLS,
    F32,
    FP8,
    I32,
    I64,
    Maker,
    mega_arguments,
    mega_buffer,
    stand_ins,
    wrapper_of,
)

pytestmark = pytest.mark.kernels

CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")
ROWS = (0, 1, 6, 48)
Answer = Callable[[Mapping[str, Any]], Any]


def writes(*names: str) -> Answer:
    """A function that fills these of its parameters."""

    def call(bound: Mapping[str, Any]) -> None:
        for name in names:
            value = bound[name]
            for part in value if isinstance(value, tuple) else (value,):
                part.fill_(1)

    return call


def columns(rows: int, inner: int) -> Tensor:
    """Packed scales of (rows, inner) values, one per 32, columns padded to 16 bytes."""
    words = torch.zeros(-(-inner // 128), layouts.align(rows, 4), dtype=I32)
    return words[:, :rows].t()


def logits(rows: int, length: int, dtype: torch.dtype) -> Tensor:
    """Rows that start at multiples of 512 values."""
    return torch.zeros(rows, layouts.align(length, 512), dtype=dtype)[:, :length]


def cast(x: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(x.shape[0], inner, dtype=FP8), columns(x.shape[0], inner)


ANSWERS: Mapping[str, Answer] = MappingProxyType(
    {
        **{
            name: writes("d")
            for name in (
                "bf16_gemm_nt", "fp8_fp4_gemm_nt", "einsum", "fp8_einsum",
                "m_grouped_bf16_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous",
                "m_grouped_fp8_fp4_gemm_nt_masked",
            )
        },
        "tf32_hc_prenorm_gemm": writes("d", "sqr_sum"),
        "bf16_mega_gate": writes("out"),
        "fp8_fp4_mega_moe": writes("y"),
        "topk": writes("output_idx"),
        "get_paged_mqa_logits_metadata": lambda bound: torch.zeros(
            bound["num_sms"] + 1, 2, dtype=I32
        ),
        "fp8_fp4_paged_mqa_logits": lambda bound: logits(
            bound["q"][0].shape[0], bound["max_context_len"],
            F32 if bound["q"][1] is None else BF16,
        ),
        "fp8_fp4_mqa_logits": lambda bound: torch.zeros(
            bound["q"][0].shape[0], bound["max_seqlen_k"]
        ),
        "flash_mla_with_kvcache": lambda bound: (
            torch.zeros(*bound["q"].shape[:3], bound["head_dim_v"], dtype=BF16),
            torch.zeros(bound["q"].shape[0], bound["q"].shape[2], 1),
        ),
        "flash_mla_sparse_fwd": lambda bound: (
            torch.zeros(*bound["q"].shape[:2], bound["d_v"], dtype=BF16),
            *(torch.zeros(bound["q"].shape[:2]) for _ in range(2)),
        ),
        "FlashMLASchedMeta": lambda bound: "schedule",
        "quant.per_token_cast": lambda bound: cast(bound["x"], bound["x"].shape[1]),
        "quant.swiglu_forward_and_per_token_cast": lambda bound: cast(
            bound["x"], bound["x"].shape[1] // 2
        ),
        "moe.moe_topk_gate_forward": lambda bound: (
            torch.zeros(bound["logits"].shape[0], bound["num_topk"], dtype=I64),
            torch.zeros(bound["logits"].shape[0], bound["num_topk"]),
        ),
    }
)  # fmt: skip
"""What each library function writes or returns, by its own parameters' names."""


@pytest.fixture(autouse=True)
def fp8_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema check compares values; the CPU compares no FP8, so those are compared as bytes."""
    plain = torch.allclose

    def allclose(one: Tensor, other: Tensor, **options: Any) -> bool:
        if one.dtype == FP8:
            return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        return plain(one, other, **options)

    monkeypatch.setattr(torch, "allclose", allclose)


@pytest.fixture
def on_the_cpu() -> Iterator[Callable[[Any, Wrapper, Any], Any]]:
    """on_the_cpu(module, wrapper, library): the op, which calls the library for the CPU."""
    with ExitStack() as scopes:

        def bind(module: Any, wrapper: Wrapper, library: Any) -> Any:
            space = module.LIBRARY.ns
            scope = scopes.enter_context(torch.library._scoped_library(space, "FRAGMENT"))

            def call(*args: Any) -> Any:
                wrapper.check(*args)
                return wrapper.call(library, *args)

            scope.impl(wrapper.name, call, "CPU")
            return getattr(getattr(torch.ops, space), wrapper.name).default

        yield bind


def package_of(module: Any) -> str:
    """The library that a module of ours wraps."""
    name: str = module.__name__.rsplit(".", 1)[-1]
    return name.removesuffix("_index").removesuffix("_experts")


def gapped(tensor: Tensor) -> Tensor:
    """The same values with a gap after each row that keeps rows at multiples of 1024 bytes."""
    if tensor.dim() < 2:
        wide = tensor.new_zeros(*tensor.shape, 2)
        wide[..., 0] = tensor
        return wide[..., 0]
    width = tensor.shape[-1]
    wide = torch.zeros(*tensor.shape[:-1], layouts.align(width + 1, 1024), dtype=tensor.dtype)
    wide[..., :width].copy_(tensor)
    return wide[..., :width]


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("rows", ROWS)
def test_opcheck(case: str, rows: int, on_the_cpu: Any) -> None:
    module, _, arguments = CALLS[case]
    *_, library = stand_ins(package_of(module), **ANSWERS)
    overload = on_the_cpu(module, wrapper_of(module, case), library.module())
    torch.library.opcheck(overload, arguments(Maker("cpu"), rows), test_utils=CHECKS)
    assert library.seen


@pytest.mark.parametrize("case", CALLS)
def test_opcheck_with_gaps(case: str, on_the_cpu: Any) -> None:
    """One argument with gaps at a time is taken, or refused by name with real and fake tensors."""
    module, _, arguments = CALLS[case]
    *_, library = stand_ins(package_of(module), **ANSWERS)
    overload = on_the_cpu(module, wrapper_of(module, case), library.module())
    args = arguments(Maker("cpu"), 6)
    for place, value in enumerate(args):
        if not isinstance(value, Tensor):
            continue
        changed = (*args[:place], gapped(value), *args[place + 1 :])
        name = overload._schema.arguments[place].name
        try:
            wrapper_of(module, case).check(*changed)
        except KernelArgumentError as error:
            assert f": {name} has" in str(error)
            with pytest.raises(KernelArgumentError):
                overload(*(a.to("meta") if isinstance(a, Tensor) else a for a in changed))
            continue
        torch.library.opcheck(overload, changed, test_utils=CHECKS)


@pytest.mark.parametrize("rows", ROWS)
def test_opcheck_of_the_fused_experts(rows: int, on_the_cpu: Any) -> None:
    make = Maker("cpu")
    *_, library = stand_ins("deep_gemm", **ANSWERS)
    mega = deep_gemm_experts.MegaMoe(mega_buffer(make, 64), 10.0)
    wrapper = Wrapper(
        deep_gemm_experts.MEGA_SCHEMA, deep_gemm_experts.check_mega_moe,
        lambda opened, *args: mega.run(opened, *args),
    )  # fmt: skip
    overload = on_the_cpu(deep_gemm_experts, wrapper, library.module())
    torch.library.opcheck(overload, mega_arguments(make, rows), test_utils=CHECKS)


def test_a_write_that_a_schema_does_not_mark_is_seen(on_the_cpu: Any) -> None:
    """Planted: a library that also writes into an input."""
    module, _, arguments = CALLS["bf16_gemm"]
    *_, library = stand_ins("deep_gemm", bf16_gemm_nt=writes("a", "d"))
    overload = on_the_cpu(module, wrapper_of(module, "bf16_gemm"), library.module())
    with pytest.raises(Exception, match="a is not defined as mutable but was mutated"):
        torch.library.opcheck(overload, arguments(Maker("cpu"), 6), test_utils=CHECKS)


def test_a_result_of_another_layout_is_seen(on_the_cpu: Any) -> None:
    """Planted: a library whose scales have dense rows of words."""
    module, _, arguments = CALLS["cast_fp8"]
    answer = {
        "quant.per_token_cast": lambda bound: (
            cast(bound["x"], 512)[0], torch.zeros(6, 4, dtype=I32)
        )
    }  # fmt: skip
    *_, library = stand_ins("tile_kernels", **answer)
    overload = on_the_cpu(module, wrapper_of(module, "cast_fp8"), library.module())
    with pytest.raises(Exception, match=r"(?i)stride"):
        torch.library.opcheck(overload, arguments(Maker("cpu"), 6), test_utils=CHECKS)
