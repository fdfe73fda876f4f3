"""Regions: one compilation over all sizes, and everything that must not happen silently."""

import pytest
import torch

from decodegrid.capture.compile import RegionCompiler, UnplannedCompilationError
from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.cpu import CpuBackend
from decodegrid.capture.lowering import MARK_PREFIXES, CompileOptions, RegionError

SIZES = [(6, 6), (2, 48), (2, 2), (5, 17), (48, 48), (8, 3)]


def plus_one(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x + 1)


def bump_both(left: torch.Tensor, right: torch.Tensor) -> None:
    left.add_(1)
    right.mul_(2)


def test_one_compilation_for_all_sizes(inductor_toy):
    """Sizes that are equal at the first call, (6, 6), are not unified; values match plain torch."""
    toy = inductor_toy
    for seed, (num_reqs, num_tokens) in enumerate(SIZES):
        toy.refill(seed)
        toy.step(num_reqs, num_tokens)()
        got = [w.clone() for w in toy.written()]
        toy.refill(seed)
        norm_weight, weight, cos = (w.detach().double() for w in toy.weights)
        x = toy.x[:num_tokens].double()
        rows = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight
        rows = rows @ weight.T * cos[toy.positions[:num_tokens]]
        per_req = toy.per_req[:num_reqs].double().sum(0)
        out = rows.softmax(-1) + per_req
        want = [toy.mid.double(), toy.out.double(), *(t.double() for t in toy.tables)]
        want[0][:num_tokens] = out.softmax(-1) + per_req
        want[1][:num_tokens] = out
        for table in want[2:]:
            table[toy.slots[:num_tokens]] = rows
        for have, need in zip(got, want, strict=True):
            torch.testing.assert_close(have.double(), need, atol=2e-5, rtol=1e-5)
    assert toy.compiler.counters.compiled_by_region == {"project": 1, "combine": 1}


def test_first_sizes_in_any_order(toy_of):
    """The smallest sizes first: still one compilation each (traced by Dynamo, run by torch)."""
    toy = toy_of("eager")
    for num_reqs, num_tokens in reversed(SIZES):
        toy.step(num_reqs, num_tokens)()
    assert toy.compiler.num_compilations == 2


def test_marks_do_not_stay_on_tensors(inductor_toy):
    inductor_toy.step(4, 4)()
    for tensor in (inductor_toy.x, *inductor_toy.tables):
        assert not [name for name in vars(tensor) if name.startswith(MARK_PREFIXES)]


def test_unplanned_variant_names_region_and_guard(eager_compiler):
    region = eager_compiler.region(plus_one, {"x": (0,), "out": (0,)}, name="head")
    region(torch.zeros(4, 8), torch.zeros(4, 8))
    with pytest.raises(UnplannedCompilationError, match=r"(?s)'head'.*1 planned.*8.*9"):
        region(torch.zeros(4, 9), torch.zeros(4, 9))
    assert eager_compiler.num_compilations == 1
    region(torch.zeros(5, 8), torch.zeros(5, 8))
    assert eager_compiler.num_compilations == 1


def test_planned_variants_compile(eager_compiler):
    region = eager_compiler.region(plus_one, {"x": (0,), "out": (0,)}, variants=2)
    for width in (8, 9, 8):
        out = torch.zeros(3, width)
        region(torch.ones(3, width), out)
        assert torch.equal(out, torch.full((3, width), 2.0))
    assert eager_compiler.num_compilations == eager_compiler.counters.planned_compilations == 2


def test_compilation_after_freeze_raises(eager_compiler):
    warm = eager_compiler.region(plus_one, {"x": (0,), "out": (0,)}, variants=2)
    cold = eager_compiler.region(plus_one, {}, name="cold")
    warm(torch.zeros(4, 8), torch.zeros(4, 8))
    eager_compiler.freeze()
    warm(torch.zeros(7, 8), torch.zeros(7, 8))
    with pytest.raises(
        UnplannedCompilationError, match=r"(?s)'plus_one'.*frozen.*dtype mismatch.*Float.*Double"
    ):
        warm(torch.zeros(4, 8).double(), torch.zeros(4, 8).double())
    with pytest.raises(UnplannedCompilationError, match=r"'cold'.*frozen.*never compiled"):
        cold(torch.zeros(4), torch.zeros(4))
    assert eager_compiler.num_compilations == 1


def test_regions_of_one_source_are_apart(eager_compiler):
    """Two closures of one code object do not share compilations or recompile limits."""

    def scaled_by(factor):
        def scale(x, out):
            out.copy_(x * factor)

        return scale

    regions = [eager_compiler.region(scaled_by(i), {}, name=f"s{i}") for i in range(12)]
    for index, region in enumerate(regions):
        out = torch.zeros(3)
        region(torch.ones(3), out)
        assert out.tolist() == [index] * 3
    assert set(eager_compiler.counters.compiled_by_region.values()) == {1}


def test_returned_values_are_refused(eager_compiler):
    computed = eager_compiler.region(lambda x: x + 1, {}, name="computed")
    passed_on = eager_compiler.region(lambda x: x, {}, name="passed_on")
    constant = eager_compiler.region(lambda x: 3, {}, name="constant")
    for region in (computed, passed_on, constant):
        with pytest.raises(RegionError, match=region.name):
            region(torch.zeros(3))


def test_graph_break_raises(eager_compiler):
    def broken(x, out):
        out.copy_(x)
        print("a host effect")
        out.add_(1)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="print"):
        eager_compiler.region(broken, {})(torch.zeros(3), torch.zeros(3))


def test_specialised_size_raises(eager_compiler):
    def square(x, out):
        out.copy_(x @ x.mT)

    with pytest.raises(Exception, match=r"specialized it to be a constant \(4\)"):
        eager_compiler.region(square, {"x": (0,)})(torch.zeros(4, 3), torch.zeros(4, 4))


def test_symbolic_size_one_is_refused(eager_compiler):
    region = eager_compiler.region(plus_one, {"x": (0,), "out": (0,)})
    with pytest.raises(RegionError, match="dimension 0 of x has size 1"):
        region(torch.zeros(1, 8), torch.zeros(1, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"function": torch.nn.Identity(), "dynamic": {}}, "plain function"),
        ({"function": plus_one, "dynamic": {"y": (0,)}}, "'y'"),
        ({"function": plus_one, "dynamic": {}, "variants": 0}, "variants is 0"),
    ],
)
def test_bad_regions(eager_compiler, arguments, message):
    with pytest.raises(ValueError, match=message):
        eager_compiler.region(**arguments)


def test_region_names_are_unique(eager_compiler):
    eager_compiler.region(plus_one, {})
    with pytest.raises(ValueError, match="registered twice"):
        eager_compiler.region(plus_one, {})


def test_shared_memory():
    """Adjacent parts of one buffer are handled; overlapping ones are refused when recorded."""
    compiler = RegionCompiler(CompileOptions("inductor", num_threads=1), CaptureCounters())
    region = compiler.region(bump_both, {"left": (0,), "right": (0,)}, variants=2)
    base = torch.ones(12, 3)
    graph = CpuBackend(compiler).capture("apart", lambda: region(base[:6], base[6:]))
    graph.replay()
    assert torch.equal(base, torch.tensor([3.0] * 6 + [4.0] * 6)[:, None].expand(12, 3))
    with pytest.raises(RegionError, match=r"'bump_both'.*share memory"):
        CpuBackend(compiler).capture("crossed", lambda: region(base[:7], base[5:]))


def test_shared_memory_that_no_guard_sees(inductor_toy):
    """Compiled for separate buffers, then called with an output that overlaps an input."""
    toy = inductor_toy
    toy.step(2, 4)()

    def crossed() -> None:
        toy.combine(toy.x[:4], toy.per_req[:2], toy.x[2:6])

    with pytest.raises(RegionError, match=r"'combine' writes out, which shares memory with x"):
        CpuBackend(toy.compiler).capture("crossed", crossed)
