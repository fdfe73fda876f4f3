"""What the libraries are called with: stand-ins with their signatures, and one call of every op.

Stand-ins take the libraries' places. Each of their functions has the parameters that were read from
a wheel and keeps what it was called with; a call with another name, one too many or one missing is
a TypeError, as it would be with the real package.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from decodegrid.kernels.providers import (
    deep_gemm,
    deep_gemm_experts,
    deep_gemm_index,
    deep_select,
    flash_mla,
    layouts,
    tile_kernels,
)
from decodegrid.kernels.providers.wrapper import Wrapper

FOLDER = Path(deep_gemm.__file__).resolve().parent
SIGNATURES: dict[str, Any] = json.loads((FOLDER / "signatures.json").read_text())
BF16, FP8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
I32, I64, I8, U8 = torch.int32, torch.int64, torch.int8, torch.uint8


def make_signature(text: str) -> inspect.Signature:
    """From "a, b=..., *, c"."""
    space: dict[str, Any] = {}
    exec(f"def call({text}): ...", space)
    return inspect.signature(space["call"])


@dataclass
class StandIn:
    """A library with recorded signatures; `results` answer by dotted name."""

    calls: dict[str, str]
    results: dict[str, Callable[..., Any]]
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def make(self, dotted: str) -> Callable[..., Any]:
        signature = make_signature(self.calls[dotted])

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments
            self.seen.append((dotted, dict(bound)))
            answer = self.results.get(dotted)
            return answer(bound) if answer is not None else None

        return call

    def module(self) -> Any:
        """As a probe gives it: functions, and modules of functions."""
        module: Any = ModuleType("stand_in")
        for dotted in self.calls:
            owner, *rest = dotted.split(".")
            if not rest:
                setattr(module, owner, self.make(dotted))
        for dotted in self.calls:
            owner, *rest = dotted.split(".")
            if rest and owner not in self.calls:
                if not hasattr(module, owner):
                    setattr(module, owner, SimpleNamespace())
                setattr(getattr(module, owner), rest[0], self.make(dotted))
        return module


def stand_ins(name: str, **results: Callable[..., Any]) -> Iterator[StandIn]:
    """One for each recorded version of a library."""
    for recorded in SIGNATURES.values():
        if recorded["import"] == name:
            yield StandIn(recorded["calls"], dict(results))


@dataclass(frozen=True, slots=True)
class Maker:
    """Tensors of zeros on one device."""

    device: str

    def __call__(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def scales(self, *shape: int, block: int = 32) -> Tensor:
        """Packed MN-major scales of values of a shape."""
        *lead, rows, columns = shape
        words = deep_gemm.packed_words(columns, block)
        step = layouts.column_rows(rows, 4)
        strides = [words * step]
        for size in reversed(lead[1:]):
            strides.insert(0, strides[0] * size)
        return torch.empty_strided(
            (*lead, rows, words), (*strides[: len(lead)], 1, step), dtype=I32, device=self.device
        ).zero_()

    def group_scales(self, tokens: int, groups: int, inner: int) -> Tensor:
        return self.scales(groups, tokens, inner).transpose(0, 1)

    def float_scales(self, rows: int, columns: int) -> Tensor:
        step = layouts.column_rows(rows, 4)
        strides = (1, step)
        return torch.empty_strided((rows, columns), strides, device=self.device).zero_()


N, K, G, E = 256, 512, 4, 8
MASKED_ROWS = 6
"""Room of each expert in the masked product, for any number of tokens."""
INNER = 256
Arguments = Callable[[Maker, int], tuple[Any, ...]]

CALLS: dict[str, tuple[Any, str, Arguments]] = {
    "bf16_gemm": (deep_gemm, "bf16_gemm_nt", lambda make, t: (make(t, K), make(N, K), make(t, N))),
    "bf16_gemm to float32": (
        deep_gemm, "bf16_gemm_nt", lambda make, t: (make(t, K), make(N, K), make(t, N, dtype=F32))
    ),
    "fp8_gemm": (
        deep_gemm, "fp8_fp4_gemm_nt",
        lambda make, t: (
            make(t, K, dtype=FP8), make.scales(t, K), make(N, K, dtype=FP8), make.scales(N, K), 32,
            make(t, N),
        ),
    ),
    "fp8_gemm with fp4": (
        deep_gemm, "fp8_fp4_gemm_nt",
        lambda make, t: (
            make(t, K, dtype=FP8), make.scales(t, K), make(N, K // 2, dtype=I8),
            make.scales(N, K), 32, make(t, N),
        ),
    ),
    "fp8_gemm on Hopper": (
        deep_gemm, "fp8_fp4_gemm_nt",
        lambda make, t: (
            make(t, K, dtype=FP8), make.float_scales(t, K // 128), make(N, K, dtype=FP8),
            make(N // 128, K // 128, dtype=F32), 128, make(t, N),
        ),
    ),
    "grouped_bf16_gemm": (
        deep_gemm, "einsum", lambda make, t: (make(t, G, K), make(G, N, K), make(t, G, N))
    ),
    "grouped_fp8_gemm": (
        deep_gemm, "fp8_einsum",
        lambda make, t: (
            make(t, G, K, dtype=FP8), make.group_scales(t, G, K), make(G, N, K, dtype=FP8),
            make.scales(G, N, K), make(t, G, N),
        ),
    ),
    "hc_prenorm": (
        deep_gemm, "tf32_hc_prenorm_gemm",
        lambda make, t: (
            make(t, K), make(24, K, dtype=F32), make(16, t, 24, dtype=F32), make(16, t, dtype=F32),
        ),
    ),
    "schedule": (
        deep_gemm_index, "get_paged_mqa_logits_metadata",
        lambda make, t: (make(t, 1, dtype=I32), 64, 132, make(t, dtype=I32)),
    ),
    "schedule on Hopper": (
        deep_gemm_index, "get_paged_mqa_logits_metadata",
        lambda make, t: (make(t, 1, dtype=I32), 64, 132, None),
    ),
    "paged_logits": (
        deep_gemm_index, "fp8_fp4_paged_mqa_logits",
        lambda make, t: (
            make(t, 1, 32, 64, dtype=I8), make(t, 1, 32, dtype=I32), make(9, 64, 1, 68, dtype=U8),
            make(t, 32), make(t, 1, dtype=I32), make(t, 16, dtype=I32), make(133, 2, dtype=I32),
            make(t, dtype=I32), 1000,
        ),
    ),
    "paged_logits on Hopper": (
        deep_gemm_index, "fp8_fp4_paged_mqa_logits",
        lambda make, t: (
            make(t, 1, 32, 128, dtype=FP8), None, make(9, 64, 1, 132, dtype=U8),
            make(t, 32, dtype=F32), make(t, 1, dtype=I32), make(t, 16, dtype=I32),
            make(133, 2, dtype=I32), None, 1000,
        ),
    ),
    "gathered_logits": (
        deep_gemm_index, "fp8_fp4_mqa_logits",
        lambda make, t: (
            make(t, 32, 64, dtype=I8), make(t, 32, dtype=I32), make(700, 64, dtype=I8),
            make(700, dtype=I32), make(t, 32), make(t, dtype=I32), make(t, dtype=I32), 700,
        ),
    ),
    "grouped_bf16": (
        deep_gemm_experts, "m_grouped_bf16_gemm_nt_contiguous",
        lambda make, t: (make(t, K), make(E, N, K), make(E, dtype=I32), make(t, N)),
    ),
    "grouped_fp8": (
        deep_gemm_experts, "m_grouped_fp8_fp4_gemm_nt_contiguous",
        lambda make, t: (
            make(t, K, dtype=FP8), make.scales(t, K), make(E, N, K // 2, dtype=I8),
            make.scales(E, N, K), make(E, dtype=I32), make(t, N),
        ),
    ),
    "masked_fp8": (
        deep_gemm_experts, "m_grouped_fp8_fp4_gemm_nt_masked",
        lambda make, t: (
            make(E, MASKED_ROWS, K, dtype=FP8), make.scales(E, MASKED_ROWS, K),
            make(E, N, K, dtype=FP8), make.scales(E, N, K), make(E, dtype=I32), 3,
            make(E, MASKED_ROWS, N),
        ),
    ),
    "gate": (
        deep_gemm_experts, "bf16_mega_gate",
        lambda make, t: (
            make(t, K), make(E, K), make(E, dtype=F32), make(t, dtype=torch.bool), 1.5,
            make(t, 2, dtype=I64), make(t, 2, dtype=F32),
        ),
    ),
    "sparse_decode": (
        flash_mla, "flash_mla_with_kvcache",
        lambda make, t: (
            make(t, 1, 64, 512), make(9, 64, 1, 528, dtype=U8), make(t, 1, 128, dtype=I32), None,
            make(64, dtype=F32), 0.04, make(9, 64, 1, 288, dtype=U8), make(t, 1, 512, dtype=I32),
            make(t, dtype=I32), False,
        ),
    ),
    "sparse_decode of a window": (
        flash_mla, "flash_mla_with_kvcache",
        lambda make, t: (
            make(t, 1, 128, 512), make(9, 64, 1, 528, dtype=U8), make(t, 1, 192, dtype=I32), None,
            make(128, dtype=F32), 0.04, None, None, None, False,
        ),
    ),
    "sparse_decode on Hopper": (
        flash_mla, "flash_mla_with_kvcache",
        lambda make, t: (
            make(t, 1, 64, 512), make(9, 64, 1, 584, dtype=U8), make(t, 1, 128, dtype=I32), None,
            make(64, dtype=F32), 0.04, make(9, 64, 1, 584, dtype=U8), make(t, 1, 512, dtype=I32),
            None, True,
        ),
    ),
    "sparse_prefill": (
        flash_mla, "flash_mla_sparse_fwd",
        lambda make, t: (
            make(t, 64, 512), make(900, 1, 512), make(t, 1, 640, dtype=I32), make(t, dtype=I32),
            make(64, dtype=F32), 0.04, False,
        ),
    ),
    "top_k": (
        deep_select, "topk",
        lambda make, t: (make(t, 1024), make(t, dtype=I32), make(t, 512, dtype=I32)),
    ),
    "cast_fp8": (tile_kernels, "quant.per_token_cast", lambda make, t: (make(t, K),)),
    "swiglu_cast": (
        tile_kernels, "quant.swiglu_forward_and_per_token_cast",
        lambda make, t: (make(t, 2 * K), make(E, dtype=I32), make(t, dtype=F32), 10.0),
    ),
    "gate of tile_kernels": (
        tile_kernels, "moe.moe_topk_gate_forward",
        lambda make, t: (
            make(t, E, dtype=F32), make(E, dtype=F32), make(t, dtype=torch.bool), 2, 1.5
        ),
    ),
}  # fmt: skip
"""Case -> our module, the library's call, our op's arguments for a number of tokens."""


def wrapper_of(module: Any, case: str) -> Wrapper:
    """The op that a case is named after."""
    known = [*module.WRAPPERS, *([module.GATE] if hasattr(module, "GATE") else [])]
    (found,) = [item for item in known if item.name == case.split(" ")[0]]
    return found


def mega_arguments(make: Maker, t: int) -> tuple[Any, ...]:
    """Of the fused experts' op, which has no call of its own among CALLS: it needs a buffer."""
    return (
        make(t, K, dtype=FP8), make(t, K // 128, dtype=I32), make(t, 2, dtype=I64),
        make(t, 2, dtype=F32), make(E, 2 * INNER, K // 2, dtype=I8),
        make.scales(E, 2 * INNER, K), make(E, K, INNER // 2, dtype=I8), make.scales(E, K, INNER),
        make(t, K),
    )  # fmt: skip


def mega_buffer(make: Maker, tokens: int) -> Any:
    """What the library's buffer shows of itself, with room for some tokens."""
    return SimpleNamespace(
        x=make(tokens, K, dtype=FP8), x_sf=make(tokens, K // 128, dtype=I32),
        topk_idx=make(tokens, 2, dtype=I64), topk_weights=make(tokens, 2, dtype=F32),
    )  # fmt: skip
