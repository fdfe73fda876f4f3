"""Properties that the uncached forward must have, whatever its weights."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model_config import ModelConfig

MakeModel = Callable[..., DraftModel]
LENGTH = 40


def random_ids(length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model(make_model: MakeModel) -> DraftModel:
    return make_model(seed=2)


@pytest.mark.parametrize("changed", [0, 1, 7, 8, 12, 13, 25, 38, 39])
def test_logits_before_a_changed_token_do_not_change(model: DraftModel, changed: int) -> None:
    ids = random_ids()
    other = ids.clone()
    other[changed] = (other[changed] + 1) % 64
    before, after = model.logits(ids), model.logits(other)
    assert torch.equal(before[:changed], after[:changed])
    assert ((before[changed:] - after[changed:]).abs().amax(-1) > 1e-9).all()


def test_a_prefix_has_the_same_logits(model: DraftModel) -> None:
    whole = model.logits(random_ids())
    for length in (1, 2, 7, 8, 9, 12, 13, 26, 39):
        found = model.logits(random_ids()[:length])
        torch.testing.assert_close(found, whole[:length], rtol=0, atol=1e-12)


def test_a_batch_is_its_rows(model: DraftModel) -> None:
    ids = torch.stack([random_ids(20, seed) for seed in range(3)])
    hidden = model(ids).hidden
    for row, found in zip(ids, hidden, strict=True):
        torch.testing.assert_close(found, model(row[None]).hidden[0], rtol=0, atol=1e-12)


def test_engram_looks_back_only(model: DraftModel) -> None:
    ids = random_ids()[None]
    whole = model.lookback(ids)
    classes = [int(token) % 64 for token in ids[0]]
    for t in range(LENGTH):
        wanted = [classes[t - back] if t >= back else 2 for back in range(3)]
        assert whole[0, t].tolist() == wanted
        assert torch.equal(model.lookback(ids[:, : t + 1])[0, t], whole[0, t])


def test_every_engram_layer_and_position_matters(model: DraftModel, make_model: MakeModel) -> None:
    ids = random_ids()
    for layer in (1, 3):
        other = make_model(seed=2)
        other.layers[layer].engram.embed.weight.zero_()
        difference = (model.logits(ids) - other.logits(ids)).abs().amax(-1)
        assert (difference > 1e-6).all()


def test_candidates_of_all_entries_are_no_restriction(make_model: MakeModel) -> None:
    ids = random_ids()
    free = make_model(candidate_source_layer_id=None).logits(ids)
    blocks = LENGTH // 2
    torch.testing.assert_close(
        make_model(candidate_topk_blocks=blocks).logits(ids), free, rtol=0, atol=1e-12
    )
    restricted = make_model().logits(ids)
    difference = (restricted - free).abs().amax(-1)
    # Four blocks of two hold everything up to 8 entries of ratio 1.
    assert (difference[:8] < 1e-12).all()
    assert (difference[8:] > 1e-9).any()


def test_top_k_of_all_entries_needs_no_indexer(make_model: MakeModel) -> None:
    changes = {"index_topk": LENGTH, "candidate_source_layer_id": None}
    model, other = make_model(**changes), make_model(**changes)
    for layer in model.config.index_source_layer_ids:
        other.layers[layer].attn.indexer.wq_b.weight.mul_(-3.0)
    ids = random_ids()
    assert torch.equal(model.logits(ids), other.logits(ids))
    narrow, changed = make_model(), make_model()
    for layer in model.config.index_source_layer_ids:
        changed.layers[layer].attn.indexer.wq_b.weight.mul_(-3.0)
    difference = (narrow.logits(ids) - changed.logits(ids)).abs().amax(-1)
    # Selective from 7 entries on: position 6 at ratio 1.
    assert (difference[:6] == 0).all() and (difference[6:] > 1e-9).any()


def test_a_reindex_layer_selects_for_itself_and_its_reusers(make_model: MakeModel) -> None:
    model = make_model()
    traces = model(random_ids()[None], trace_indexer=True).traces
    assert [trace.layer for trace in traces] == [1, 3, 4, 6]
    used = [len(trace.mass) for trace in traces]
    assert used == [2, 1, 2, 2], "layers 1-2, 3, 4-5, 6-7"
    for trace in traces:
        chosen = trace.scores > float("-inf")
        ratio = model.config.compress_ratios[trace.layer]
        lengths = (torch.arange(LENGTH) + 1) // ratio
        assert torch.equal(chosen[0].sum(-1), lengths.clamp(max=6))
        for mass in trace.mass:
            assert (mass[~chosen] == 0).all()
            assert (mass[chosen] > 0).all() and mass.max() <= 4.0
    source, reindex = (trace.scores[0] > float("-inf") for trace in traces[2:])
    assert (source != reindex).any()


def test_tracing_changes_no_value(model: DraftModel) -> None:
    ids = random_ids()[None]
    assert torch.equal(model(ids).hidden, model(ids, trace_indexer=True).hidden)


def test_taps_are_mean_streams_before_their_layers(make_model: MakeModel) -> None:
    """A tap sees what the layers before it did, and nothing of its own layer or later ones."""
    ids = random_ids()[None]
    plain = make_model()(ids).taps.unflatten(-1, (3, 32))
    for layer in range(8):
        other = make_model()
        other.layers[layer].attn.wo_b.weight.zero_()
        moved = (other(ids).taps.unflatten(-1, (3, 32)) - plain).abs().amax((0, 1, 3)) > 1e-9
        assert moved.tolist() == [layer < tap for tap in (5, 6, 7)]


class Round:
    """One draft round after the random ids, with what a test wants to change."""

    def __init__(self, model: DraftModel, length: int = 20) -> None:
        self.model = model
        taps = model(random_ids(length)[None]).taps
        self.context = model.draft_context(taps)
        self.positions = torch.arange(length)
        self.keys = model.context_keys(self.context, self.positions)
        self.live = (self.positions >= length - 8)[None]
        self.anchor = torch.tensor([17])
        self.at = torch.tensor([length])

    def hidden(self) -> Tensor:
        return self.model.draft_hidden(self.anchor, self.at, self.keys, self.live)[0]


def test_draft_rows_do_not_depend_on_the_order_of_context_keys(model: DraftModel) -> None:
    draft = Round(model)
    before = draft.hidden()
    order = torch.randperm(20, generator=torch.Generator().manual_seed(4))
    draft.keys = [keys[:, order] for keys in draft.keys]
    draft.live = draft.live[:, order]
    torch.testing.assert_close(draft.hidden(), before, rtol=0, atol=1e-12)


def test_dead_context_keys_are_not_read(model: DraftModel) -> None:
    draft = Round(model)
    before = draft.hidden()
    for keys in draft.keys:
        keys[~draft.live] = 1e6
    assert torch.equal(draft.hidden(), before)
    draft.keys[1][:, 15] += 1.0
    assert ((draft.hidden() - before).abs().amax(-1) > 1e-9).all()


def test_a_changed_noise_id_changes_every_row(model: DraftModel, make_model: MakeModel) -> None:
    before = Round(model).hidden()
    other = make_model(seed=2, dspark_noise_token_id=94)
    assert ((Round(other).hidden() - before).abs().amax(-1) > 1e-6).all()


def test_every_row_sees_every_other_row(make_model: MakeModel) -> None:
    """No causal mask in the block: a change in the last slot alone reaches the first."""
    model = make_model(seed=2)
    draft = Round(model)
    block = model.mtp[0]
    x = torch.randn(1, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    slots = draft.at[:, None] + torch.arange(5)
    before = block.draft_attention(x, slots, draft.keys[0], draft.live)
    for changed in range(5):
        other = x.clone()
        other[:, changed] += 1.0
        after = block.draft_attention(other, slots, draft.keys[0], draft.live)
        assert ((after - before).abs().amax(-1) > 1e-9).all()


def test_rounds_of_a_batch_are_independent(model: DraftModel) -> None:
    draft = Round(model)
    alone = draft.hidden()
    draft.anchor, draft.at = torch.tensor([17, 5]), torch.tensor([20, 20])
    draft.keys = [keys.repeat(2, 1, 1) for keys in draft.keys]
    draft.live = torch.cat((draft.live, torch.zeros_like(draft.live)))
    torch.testing.assert_close(draft.hidden(), alone, rtol=0, atol=1e-12)


def test_logits_take_one_vector(model: DraftModel, small_config: ModelConfig) -> None:
    """`logits` takes a vector; the message for anything else names the shape."""
    assert model.config == small_config
    with pytest.raises(ValueError, match=r"shape \(0,\)"):
        model.logits(torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \(1, 3\)"):
        model.logits(torch.zeros(1, 3, dtype=torch.int64))


def test_dtypes(make_model: MakeModel) -> None:
    ids = random_ids()
    exact = make_model().logits(ids)
    assert exact.dtype == torch.float64
    single = make_model(dtype=torch.float32)
    assert single.logits(ids).dtype == torch.float32
    half = make_model(dtype=torch.bfloat16)
    assert half.logits(ids).dtype == torch.float32
    assert half.layers[0].hc_attn_fn.dtype == torch.float32
    assert half.layers[0].attn.wq_a.weight.dtype == torch.bfloat16
    assert half.layers[0].attn.frequencies.dtype == torch.float32
    assert (single.logits(ids) - exact).abs().median() < 1e-4
