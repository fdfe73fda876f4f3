"""The calls into the libraries, bound against the real packages' signatures: fake CUDA tensors."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from decodegrid.kernels.providers import (
    deep_ep,
    deep_gemm,
    deep_gemm_experts,
    deep_gemm_index,
    deep_select,
    flash_mla,
)
from decodegrid.kernels.providers.packages import PACKAGES
from decodegrid.kernels.providers.wrapper import KernelArgumentError, is_bound
from tests.kernels.providers.library_calls import (
    BF16,
    CALLS,
    F32,
    I8,
    I32,
    I64,
    INNER,
    SIGNATURES,
    U8,
    E,
    G,
    K,
    Maker,
    N,
    mega_arguments,
    mega_buffer,
    stand_ins,
    wrapper_of,
)

MAKE, T = Maker("cuda"), 6
make, scales = MAKE, MAKE.scales
FakeCuda = Callable[[], AbstractContextManager[None]]


def answers(result: Any) -> dict[str, Callable[..., Any]]:
    """What each library function gives back, in the shapes of its own documentation."""
    first = result[0] if isinstance(result, tuple) else result
    pair = result if isinstance(result, tuple) else (first, first)
    return {
        "fp8_fp4_paged_mqa_logits": lambda bound: first,
        "fp8_fp4_mqa_logits": lambda bound: first,
        "get_paged_mqa_logits_metadata": lambda bound: first,
        "flash_mla_with_kvcache": lambda bound: (first, first),
        "flash_mla_sparse_fwd": lambda bound: (first, first, first),
        "FlashMLASchedMeta": lambda bound: "schedule",
        "quant.per_token_cast": lambda bound: pair,
        "quant.swiglu_forward_and_per_token_cast": lambda bound: pair,
        "moe.moe_topk_gate_forward": lambda bound: pair,
    }


@pytest.mark.parametrize("case", CALLS)
def test_calls_bind_to_the_recorded_signatures(case: str, fake_cuda: FakeCuda) -> None:
    """Every version of the library takes the call that our op makes, and the op's fake gives the
    shape and dtype of what it returns."""
    module, call, arguments = CALLS[case]
    wrapper = wrapper_of(module, case)
    name = module.__name__.rsplit(".", 1)[-1].removesuffix("_index").removesuffix("_experts")
    versions = 0
    with fake_cuda():
        args = arguments(MAKE, T)
        op = getattr(getattr(torch.ops, module.LIBRARY.ns), wrapper.name).default
        want = op(*args)
        for library in stand_ins(name, **answers(want)):
            got = wrapper.call(library.module(), *args)
            versions += 1
            seen = [dotted for dotted, _ in library.seen]
            assert seen[-1] == call and set(seen[:-1]) <= {"FlashMLASchedMeta"}
            for ours, theirs in zip(_tensors(want), _tensors(got), strict=True):
                assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            bound = dict(library.seen[-1][1])
            # A tensor that the op got and the library did not would be a tensor forgotten.
            passed = {id(t) for t in _tensors(list(bound.values()))}
            assert {id(t) for t in _tensors(args)} <= passed
    assert versions == (2 if name == "deep_gemm" else 1)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for item in value for t in _tensors(item)]
    return []


def test_what_the_calls_say(fake_cuda: FakeCuda) -> None:
    """Arguments that decide about numerics and layouts."""
    with fake_cuda():
        seen = {}
        for case, (module, _, arguments) in CALLS.items():
            name = module.__name__.rsplit(".", 1)[-1].split("_index")[0].split("_experts")[0]
            args = arguments(MAKE, T)
            op = getattr(getattr(torch.ops, module.LIBRARY.ns), wrapper_of(module, case).name)
            *_, library = stand_ins(name, **answers(op.default(*args)))
            wrapper_of(module, case).call(library.module(), *args)
            seen[case] = library.seen[-1][1]
    assert seen["fp8_gemm"]["recipe_a"] == seen["fp8_gemm"]["recipe_b"] == (1, 32)
    assert seen["fp8_gemm on Hopper"]["recipe"] == (1, 128, 128)
    assert seen["grouped_fp8_gemm"]["recipe"] == (1, 1, 32)
    assert seen["grouped_fp8_gemm"]["expr"] == seen["grouped_bf16_gemm"]["expr"] == "bhr,hdr->bhd"
    assert seen["hc_prenorm"]["num_splits"] == 16
    for case in ("grouped_fp8", "grouped_bf16"):
        assert seen[case]["use_psum_layout"] is True
    decode = seen["sparse_decode"]
    assert decode["head_dim_v"] == 512 and decode["is_fp8_kvcache"] is True
    # A new schedule each time: one that was made before a capture would keep its lengths.
    assert decode["tile_scheduler_metadata"] == "schedule" and "use_legacy" not in decode
    assert seen["sparse_decode on Hopper"]["use_legacy"] is True
    assert seen["top_k"]["idx_oob_fill_value"] == -1 and seen["top_k"]["sorted_index"] is True
    assert seen["top_k"]["topk"] == 512 and seen["top_k"]["return_value"] is False
    cast = seen["cast_fp8"]
    assert cast["use_packed_ue8m0"] and cast["use_tma_aligned_col_major_sf"] and cast["round_sf"]
    assert seen["gate"]["ep_rank"] == 0 and seen["gate"]["use_shared_as_routed"] is False


def replaced(args: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*args[:place], value, *args[place + 1 :])


WRONG: list[tuple[str, int, Callable[[], Any], str]] = [
    ("bf16_gemm", 0, lambda: make(T, K, dtype=F32), "a is float32"),
    ("bf16_gemm", 1, lambda: make(N, K + 8), "b is bfloat16"),
    ("bf16_gemm", 2, lambda: make(T + 1, N), "out is bfloat16"),
    ("bf16_gemm", 0, lambda: make(K, T).t(), "a has strides"),
    ("fp8_gemm", 1, lambda: make(T, K // 128, dtype=I32), "a_scales has strides"),
    ("fp8_gemm", 1, lambda: scales(T, 2 * K), "a_scales is int32"),
    ("fp8_gemm", 4, lambda: 16, "one scale per 16 channels"),
    ("grouped_fp8_gemm", 1, lambda: scales(T, G, K), "a_scales has strides"),
    ("paged_logits", 2, lambda: make(9, 48, 1, 68, dtype=U8), "pages of 48 entries"),
    ("paged_logits", 7, lambda: None, "need the request of each token"),
    ("paged_logits on Hopper", 7, lambda: make(T, dtype=I32), "takes no request ids"),
    ("grouped_fp8", 4, lambda: make(E + 1, dtype=I32), "ends is int32"),
    ("masked_fp8", 5, lambda: T + 1, "expected rows 7 of 6"),
    ("sparse_decode", 0, lambda: make(T, 1, 48, 512), "48 heads"),
    ("sparse_decode", 1, lambda: make(9, 64, 1, 584, dtype=U8), "window is uint8"),
    ("sparse_decode", 2, lambda: make(T, 1, 100, dtype=I32), "100 columns"),
    ("sparse_decode", 7, lambda: None, "come together"),
    ("sparse_prefill", 2, lambda: make(T, 1, 130, dtype=I32), "a multiple of 64"),
    ("top_k", 0, lambda: make(T, 1000), "rows at multiples of 1024 bytes"),
    ("top_k", 2, lambda: make(T, 5000, dtype=I32), "up to 4096"),
    ("cast_fp8", 0, lambda: make(T, 100), "no multiple of 128"),
    ("gate of tile_kernels", 3, lambda: E + 1, "top_k is 9"),
]


@pytest.mark.parametrize(("case", "place", "value", "words"), WRONG)
def test_what_a_kernel_does_not_take_is_refused(
    case: str, place: int, value: Callable[[], Any], words: str, fake_cuda: FakeCuda
) -> None:
    """Where a step is traced, by the op's fake, and the message names op and argument."""
    module, _, arguments = CALLS[case]
    op = getattr(getattr(torch.ops, module.LIBRARY.ns), wrapper_of(module, case).name).default
    with fake_cuda(), pytest.raises(KernelArgumentError) as error:
        op(*replaced(arguments(MAKE, T), place, value()))
    assert words in str(error.value) and str(error.value).startswith(case.split(" ")[0])


def test_the_fused_kernel_and_its_buffer(fake_cuda: FakeCuda) -> None:
    """Tokens go through the buffer's views; the limit is the buffer's."""
    limit = 10.0
    for library in stand_ins("deep_gemm"):
        with fake_cuda():
            buffer, args = mega_buffer(MAKE, 8), mega_arguments(MAKE, T)
            torch.ops.decodegrid_experts.mega_moe(*args)
            mega = deep_gemm_experts.MegaMoe(buffer, limit)
            mega.run(library.module(), *args)
            (call,) = library.seen
            assert call[0] == "fp8_fp4_mega_moe" and call[1]["sym_buffer"] is buffer
            assert call[1]["activation_clamp"] == limit and call[1]["y"] is args[8]
            with pytest.raises(KernelArgumentError, match="mega_moe: w2 is int8"):
                torch.ops.decodegrid_experts.mega_moe(
                    *replaced(args, 6, make(E, K, INNER, dtype=I8))
                )
        deep_gemm_experts.make_mega_buffer(library.module(), "group", E, 64, 2, K, INNER)
        assert library.seen[-1][0] == "mega.get_symm_buffer_for_mega_moe"


def test_one_rank_exchanges_nothing() -> None:
    """On real tensors of the CPU: the same tensors come back."""
    x, ids = torch.randn(5, 16), torch.randint(0, 4, (5, 2))
    weights = torch.rand(5, 2)
    exchange = deep_ep.make_exchange(None, None, 4, 8, 16, 2)
    received = exchange.dispatch(x, ids, weights)
    assert received.x is x and received.ids is ids and received.weights is weights
    results = torch.randn(5, 16)
    assert exchange.combine(results, received) is results
    alone = SimpleNamespace(size=lambda: 1)
    assert isinstance(deep_ep.make_exchange(None, alone, 4, 8, 16, 2), deep_ep.OneRank)
    with pytest.raises(KernelArgumentError, match="dispatch: ids is int32"):
        exchange.dispatch(x, ids.to(I32), weights)
    with pytest.raises(KernelArgumentError, match="combine: results is"):
        exchange.combine(results[:4], received)


def test_several_ranks_need_the_library() -> None:
    """Calls of the elastic buffer as the package has them; its host never waits."""
    group = SimpleNamespace(size=lambda: 4)
    with pytest.raises(ValueError, match="4 ranks exchange tokens, but deep_ep is not ready"):
        deep_ep.make_exchange(None, group, 16, 8, 64, 2)
    (recorded,) = stand_ins("deep_ep")
    x, ids, weights = torch.zeros(3, 64, dtype=BF16), torch.zeros(3, 2, dtype=I64), torch.ones(3, 2)
    answers = {"dispatch": (x, ids, weights, "handle", "event"), "combine": (x, None, "event")}

    class Buffer:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            recorded.make("ElasticBuffer")(*args, **kwargs)

        def __getattr__(self, name: str) -> Callable[..., Any]:
            call = recorded.make(f"ElasticBuffer.{name}")
            return lambda *a, **k: (call(*a, **k), answers.get(name))[1]

    exchange = deep_ep.make_exchange(
        SimpleNamespace(ElasticBuffer=Buffer),
        group,
        16,
        8,
        64,
        2,  # type: ignore[arg-type]
    )
    received = exchange.dispatch(x, ids, weights)
    assert received.handle == "handle" and exchange.combine(x, received) is x
    exchange.close()  # type: ignore[attr-defined]
    names = [name for name, _ in recorded.seen]
    assert names == [
        "ElasticBuffer", "ElasticBuffer.dispatch", "ElasticBuffer.combine", "ElasticBuffer.destroy"
    ]  # fmt: skip
    assert recorded.seen[1][1]["do_cpu_sync"] is False
    assert recorded.seen[2][1]["handle"] == "handle"


def test_nothing_is_bound_where_nothing_runs() -> None:
    """Ops of the libraries can be traced here and not run: a call says so by itself."""
    for module in (deep_gemm, deep_gemm_index, deep_gemm_experts, flash_mla, deep_select):
        for wrapper in module.WRAPPERS:
            assert not is_bound(module.LIBRARY, wrapper)
    with pytest.raises(NotImplementedError):
        torch.ops.decodegrid_gemm.bf16_gemm(*(torch.zeros(16, 16, dtype=BF16) for _ in range(3)))


def test_every_call_was_compared_with_the_real_packages() -> None:
    """The committed result of `make check-libraries` is of these signatures and says "same"."""
    result = json.loads((Path(__file__).resolve().parent / "library_check.json").read_text())
    assert {key: set(calls) for key, calls in result["libraries"].items()} == {
        key: set(recorded["calls"]) for key, recorded in SIGNATURES.items()
    }
    words = [word for calls in result["libraries"].values() for word in calls.values()]
    assert set(words) | set(result["layouts"].values()) == {"same"}
    recorded = {key.split("==")[0] for key in SIGNATURES}
    libraries = [p for p in PACKAGES if p.name != "cuda"]
    assert {name for item in libraries for name in item.distributions} == recorded
    for item in libraries:
        calls = [r["calls"] for r in SIGNATURES.values() if r["import"] == item.name]
        assert all(set(item.attributes) <= set(found) for found in calls), item.name
