"""The training forward against the model's own: loss, gradients, selection, attention mass."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model import ForwardOutput
from training.fast_forward import FastForward
from training.train_target import index_loss

MakeModel = Callable[..., DraftModel]


def losses_and_gradients(
    model: DraftModel, forward: Callable[[Tensor], ForwardOutput], ids: Tensor
) -> tuple[Tensor, ForwardOutput, dict[str, Tensor]]:
    """Cross entropy plus the indexer's loss, and the gradient of every parameter it reaches."""
    model.zero_grad()
    output = forward(ids)
    loss = F.cross_entropy(model.head_logits(output.hidden).flatten(0, 1), ids.roll(-1).flatten())
    if output.traces:
        loss = loss + index_loss(output.traces)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), output, grads


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("trace", [True, False])
def test_equals_the_models_forward(make_model: MakeModel, dense: bool, trace: bool) -> None:
    changes = {"index_topk": 64, "candidate_topk_blocks": 64} if dense else {}
    model = make_model(3, **changes).requires_grad_(True)
    ids = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    loss, output, grads = losses_and_gradients(model, lambda x: model(x, trace_indexer=trace), ids)
    fast = FastForward(model)
    loss2, output2, grads2 = losses_and_gradients(
        model, lambda x: fast(x, dense=dense, trace_indexer=trace), ids
    )
    torch.testing.assert_close(loss2, loss, rtol=0, atol=1e-9)
    torch.testing.assert_close(output2.hidden, output.hidden, rtol=0, atol=1e-8)
    torch.testing.assert_close(output2.taps, output.taps, rtol=0, atol=1e-8)
    moving = {name for name, grad in grads.items() if grad.abs().max() > 0}
    assert len(moving) > 100
    assert moving <= set(grads2)
    for name in moving:
        size = float(grads[name].abs().max())
        torch.testing.assert_close(grads2[name], grads[name], rtol=0, atol=1e-7 * size)
    assert len(output2.traces) == (4 if trace else 0)
    for one, two in zip(output.traces, output2.traces, strict=True):
        torch.testing.assert_close(two.scores, one.scores, rtol=0, atol=1e-9)
        for mass, mass2 in zip(one.mass, two.mass, strict=True):
            torch.testing.assert_close(mass2, mass, rtol=0, atol=1e-9)


def test_records_round_where_a_cache_does(make_model: MakeModel) -> None:
    model = make_model(3, head_dim=32, index_head_dim=32)
    ids = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    fast = FastForward(model)
    plain, rounded = fast(ids, dense=False).hidden, fast(ids, dense=False, records=True).hidden
    assert float((plain - rounded).abs().max()) > 1e-3
    expected = model(ids, kv_cache="v41").hidden
    close = (rounded - expected).abs().amax(-1) < 1e-4
    # A key on the edge of two codes, or a tie in the selection, may fall to the other side.
    assert float(close.double().mean()) > 0.9


def test_mean_loss_weighs_targets(make_model: MakeModel) -> None:
    model = make_model(3)
    ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1)
    targets[0, 3] = -100
    weights = torch.ones(2, 16)
    weights[1] = 0.25
    fast = FastForward(model)
    output = fast(ids, dense=False)
    each = F.cross_entropy(
        model.head_logits(output.hidden).flatten(0, 1), targets.flatten(), reduction="none"
    ).view(2, 16)
    expected = (each[0].sum() + 0.25 * each[1].sum()) / (15 + 4)
    torch.testing.assert_close(fast.mean_loss(output, targets, weights), expected)
    torch.testing.assert_close(fast.mean_loss(output, targets), each.sum() / 31)


def test_spread_is_the_mass_outside_the_selection_and_has_its_gradients(
    make_model: MakeModel,
) -> None:
    """Value from a plain softmax, gradients from differences along the gradient itself."""
    model = make_model(3).requires_grad_(True)
    ids = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    fast = FastForward(model)
    names = ("attn_sink", "wq_b.weight", "wkv.weight", "compressor.wkv.weight")
    moved = [p for n, p in model.layers.named_parameters() if n.endswith(names)]

    def spread() -> Tensor:
        output = fast(ids, dense=True, trace_indexer=True, spread=True)
        assert len(fast.spreads) == sum(len(trace.mass) for trace in output.traces) > 0
        return torch.stack(fast.spreads).sum()

    value = spread()
    assert 0.0 < float(value.detach()) < len(fast.spreads)
    slopes = torch.autograd.grad(value, moved, allow_unused=True)
    found_slopes = [(p, s) for p, s in zip(moved, slopes, strict=True) if s is not None and s.any()]
    assert len(found_slopes) > 10
    for parameter, slope in found_slopes:
        step = 1e-5 * slope / slope.norm()
        with torch.no_grad():
            sides = []
            for sign in (1.0, -2.0, 1.0):
                parameter.add_(sign * step)
                sides.append(float(spread()))
        found = (sides[0] - sides[1]) / 2e-5
        assert found == pytest.approx(float(slope.norm()), rel=1e-4)


def test_selection_changes_the_loss(make_model: MakeModel) -> None:
    """The top-k form differs from the dense one, so that the test above compares two things."""
    model = make_model(3)
    ids = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(1))
    fast = FastForward(model)
    wide, narrow = fast(ids, dense=True).hidden, fast(ids, dense=False).hidden
    assert float((wide - narrow).abs().max()) > 1e-3


def test_loads_count_every_choice(make_model: MakeModel) -> None:
    model = make_model(3)
    fast = FastForward(model)
    fast(torch.randint(0, 96, (2, 16)), dense=True)
    assert [int(load.sum()) for load in fast.loads] == [2 * 16 * 3] * 8
