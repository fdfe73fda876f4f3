"""The native CPU kernels against the plain torch functions they stand in for."""

from pathlib import Path

import pytest
import torch

from decodegrid.capture.total_scan import NumpyScan
from decodegrid.engine.surface_run import fastest_scan
from decodegrid.kernels import filters, moe, sampling, select_entries
from decodegrid.kernels.hyper_connection import sinkhorn, sinkhorn_op
from decodegrid.kernels.native import (
    OPS,
    NativeBuildError,
    build_library,
    install_native_kernels,
    library_path,
    loaded_library,
)

BUILD = Path(__file__).resolve().parents[2] / "build" / "native"


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    install_native_kernels(BUILD)
    # Twice is once.
    install_native_kernels(BUILD)
    # Named after its content: another test of this process may have loaded it from its own cache.
    loaded = loaded_library()
    assert loaded is not None and loaded.name == library_path(BUILD).name
    assert fastest_scan() is not NumpyScan
    for name in OPS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"decodegrid::{name}", "CPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("count", "size", "iters"), [(1, 4, 20), (13, 4, 20), (9, 3, 1), (8, 8, 5)]
)
def test_sinkhorn(count: int, size: int, iters: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    logits = 3 * torch.randn(count, size, size, dtype=dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    found = sinkhorn_op(logits, iters, 1e-6)
    torch.testing.assert_close(found, sinkhorn(logits, iters, 1e-6), rtol=tolerance, atol=tolerance)
    strided = logits.transpose(-1, -2)
    wanted = sinkhorn(strided, iters, 1e-6)
    found = sinkhorn_op(strided, iters, 1e-6)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_sinkhorn_refuses_what_it_cannot_do() -> None:
    with pytest.raises(RuntimeError, match=r"side 9, allowed 1\.\.8"):
        sinkhorn_op(torch.zeros(1, 9, 9), 20, 1e-6)
    with pytest.raises(RuntimeError, match="0 rounds"):
        sinkhorn_op(torch.zeros(1, 4, 4), 0, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 2, 7, 32, 33, 80])
def test_routed_experts(tokens: int, dtype: torch.dtype) -> None:
    """Both sides of the limit where the kernel changes its way; ids of 5 visit no expert."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 24, dtype=dtype, generator=generator)
    ids = torch.randint(0, 6, (tokens, 2), generator=generator)
    weights = torch.rand(tokens, 2, dtype=dtype, generator=generator)
    w13 = torch.randn(5, 24, 2 * 40, dtype=dtype, generator=generator)
    w2 = torch.randn(5, 40, 24, dtype=dtype, generator=generator)
    wanted = moe.routed_experts(x.double(), ids, weights.double(), w13.double(), w2.double(), 1.5)
    found = moe.routed_experts_op(x, ids, weights, w13, w2, 1.5)
    assert found.dtype == dtype
    tolerance = 2e-4 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
    visited = (ids < 5).any(1)
    assert torch.equal(found[~visited], torch.zeros_like(found[~visited]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("length", [3, 8, 9, 61])
def test_select_entries(length: int, mode: int, dtype: torch.dtype) -> None:
    """Equal to the reference, ties (zero head weights and rounded scores) included."""
    generator = torch.Generator().manual_seed(length)
    count, top_k = 6, 8
    # Small integers make exact ties in both orders of summation.
    query = torch.randint(-2, 3, (count, 4, 8), generator=generator).to(dtype)
    weights = torch.randint(-1, 3, (count, 4), generator=generator).to(dtype)
    weights[0] = 0
    pool = torch.randint(-2, 3, (40 * 8, 8), generator=generator).to(dtype)
    blocks = torch.randperm(39, generator=generator)[:20].add(1).view(2, 10)
    table = torch.cat((torch.zeros(1, 10, dtype=torch.int64), blocks))
    slots = torch.tensor([1, 1, 2, 2, 0, 0])
    lengths = torch.tensor([length, length - 1, length, 1, 0, 0])
    start = torch.rand(count, 80, generator=generator) > 0.3
    outs = []
    for function in (select_entries.select_entries, select_entries.select_entries_op):
        candidates = start.clone()
        out = torch.zeros(count, top_k, dtype=torch.int64)
        function(
            query, weights, pool, table, slots, lengths, 1, 8, mode, 4, 3, candidates, out
        )
        outs.append((out, candidates))
    assert torch.equal(outs[0][0], outs[1][0])
    for token in range(count):
        seen = int(lengths[token])
        assert torch.equal(outs[0][1][token, :seen], outs[1][1][token, :seen])
        assert torch.equal(outs[1][1][token, seen:], start[token, seen:])


def test_noise_bits_do_not_depend_on_the_batch() -> None:
    seed = torch.tensor([0, 1, 2**63 - 1, 12345, 77])
    position = torch.tensor([0, 5, 2**31, 17, 4095])
    heat = torch.tensor([1.0, 0.5, 2.0, 0.0, 1e-5])
    together = sampling.gumbel_noise_op(seed, position, heat, 3001)
    order = torch.tensor([4, 2, 0, 3, 1])
    shuffled = sampling.gumbel_noise_op(seed[order], position[order], heat[order], 3001)
    assert torch.equal(shuffled, together[order])
    alone = torch.cat(
        [
            sampling.gumbel_noise_op(seed[i : i + 1], position[i : i + 1], heat[i : i + 1], 3001)
            for i in range(5)
        ]
    )
    assert torch.equal(alone, together)
    reference = sampling.gumbel_noise(seed, position, heat, 3001)
    torch.testing.assert_close(together, reference, rtol=1e-6, atol=1e-6)
    assert not together[3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [0.0, 0.5])
@pytest.mark.parametrize("vocab", [1, 13, 1000])
def test_filter_logits(vocab: int, step: float, dtype: torch.dtype) -> None:
    """The same survivors and the same bits as the reference, ties and masked tokens included."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(200, vocab, generator=generator, dtype=torch.float64)
    logits = ((logits / step).round() * step if step else logits).to(dtype)
    logits[torch.rand(logits.shape, generator=generator) < 0.05] = float("-inf")
    choices = torch.randint(0, 6, (4, 200), generator=generator)
    heat = torch.tensor([0.0, 1e-6, 0.5, 0.7, 1.0, 9.0], dtype=dtype)[choices[0]]
    top_p = torch.tensor([1e-9, 0.2, 0.5, 0.95, 1.0, 1.0], dtype=dtype)[choices[1]]
    top_k = torch.tensor([-1, -1, 1, 5, 500, 2000])[choices[2]]
    min_p = torch.tensor([0.0, 0.0, -1.0, 0.02, 0.3, 1.0], dtype=dtype)[choices[3]]
    asked = heat, top_p, top_k, min_p
    wanted = filters.filter_logits(logits, *asked)
    assert torch.equal(filters.filter_logits_op(logits, *asked), wanted)
    strided = logits.t().contiguous().t()
    assert torch.equal(filters.filter_logits_op(strided, *asked), wanted)
    assert vocab == 1 or int((wanted == float("-inf")).sum()) > 1.5 * int(logits.isinf().sum())


def test_uniform_noise() -> None:
    """The same bits as the reference, at the ends of the range too."""
    seed = torch.tensor([0, 1, 2**63 - 1, 12345, 77])
    position = torch.tensor([0, 5, 2**28 - 1, 17, 2**31])
    found = sampling.uniform_noise_op(seed, position)
    assert torch.equal(found, sampling.uniform_noise(seed, position))
    assert torch.equal(sampling.uniform_noise_op(seed.flip(0), position.flip(0)), found.flip(0))


def test_library_key_and_compiler_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One library per source; a broken source gives one error and leaves nothing behind."""
    import decodegrid.kernels.native as native

    assert library_path(tmp_path) == library_path(tmp_path)
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is not C++")
    kept = library_path(tmp_path)
    monkeypatch.setattr(native, "SOURCES", (broken,))
    assert library_path(tmp_path) != kept
    cache = tmp_path / "cache"
    with pytest.raises(NativeBuildError, match=r"broken\.cpp"):
        build_library(cache)
    assert list(cache.iterdir()) == []
