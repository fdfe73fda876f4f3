"""Bounded replay against an uncached forward whose decoder layers have the same short windows."""

import pytest
import torch

from decodegrid.graphs.bounded_replay import bounded_regions, check_bounded_replay
from decodegrid.kernels.sparse_attention import dense_attention

KEEP = 12
MODES = ("mask", "compact")
ATOL = 1e-13
"""Values are of order one."""


@pytest.fixture(scope="module")
def make_bounded(make_model, new_run, layer_changes):
    """make_bounded(mode, keep): a run of three rows over one model, two drafts."""
    made, model = {}, make_model(**layer_changes[4], hc_sinkhorn_iters=2)

    def make(mode, keep=KEEP, kv_cache="compute"):
        key = (mode, keep, kv_cache)
        if key not in made:
            made[key] = new_run(model, 2, 3, (3,), kv_cache=kv_cache, bounded=(mode, keep))
        made[key].reset()
        return made[key]

    return make


def begin(run, slot, prompt, sizes=()):
    run.runner.bound_prefill(max(0, len(prompt) - run.runner.keep_tokens))
    run.begin(slot, prompt, sizes)


def reference_logits(model, text, lower):
    """Uncached logits of a text in which decoder layers see no window key below `lower`."""
    layers = iter(range(model.config.num_hidden_layers))

    def core(query, window_keys, sink, window, compressed, selected):
        if next(layers) < model.config.num_prefill_layers:
            return dense_attention(query, window_keys, sink, window, compressed, selected)
        scale = query.shape[-1] ** -0.5
        keys = torch.cat((window_keys, compressed), 1)
        scores = torch.einsum("bshd,bkd->bshk", query * scale, keys)
        size = query.shape[1]
        seen = torch.zeros(size, keys.shape[1], dtype=torch.bool)
        for row in range(size):
            seen[row, max(lower, row - window + 1, 0) : row + 1] = True
        seen[:, size:] = selected[0]
        scores = scores.masked_fill(~seen[None, :, None], float("-inf"))
        scores = torch.cat((scores, sink[None, None, :, None].expand(1, size, -1, 1)), -1)
        return torch.einsum("bshk,bkd->bshd", scores.softmax(-1)[..., :-1], keys), None

    hidden = model.forward(torch.tensor(text).unsqueeze(0), core).hidden[0]
    return model.head_logits(hidden)


def differences(run, slot, lower):
    """Largest difference of the logits behind what a slot emitted to the reference's."""
    text, start = run.texts[slot], run.prompt_lens[slot]
    want = reference_logits(run.model, text, lower)[start - 1 : -1]
    assert run.emitted(slot) == want.argmax(-1).tolist()
    return float((torch.stack(run.logits[slot]) - want).abs().max())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [(), (3, 16, 1, 9, 4, 2), (16, 16, 16, 1, 1, 1)])
def test_decoding_is_that_of_the_reference(make_bounded, make_prompt, mode, sizes):
    """Any chunking; the state differs from an exact prefill's, which the last line shows."""
    run = make_bounded(mode)
    prompt = make_prompt(53, 1)
    begin(run, 1, prompt, sizes)
    run.decode([1], 1)
    for _ in range(6):
        truth = reference_logits(run.model, run.texts[1], 53 - KEEP)[-1].argmax()
        run.force_drafts(1, [int(truth), 3])
        run.decode([1], 3)
    assert run.accepted > 4
    assert differences(run, 1, 53 - KEEP) < 1e-9
    assert float((torch.stack(run.logits[1]) - run.reference_logits(1)).abs().max()) > 1e-6


@pytest.mark.parametrize("kv_cache", ["compute", "v41"])
def test_both_modes_agree(make_model, layer_changes, new_run, make_prompt, kv_cache):
    """All that decoding may read behind the prompt, and what it then emits and drafts.

    To the rounding of float64: products of other numbers of rows need not be summed in one order,
    and whether they are changes while a process lives. Records in 8 and 4 bits are equal.
    """
    dims = {"head_dim": 32, "index_head_dim": 32} if kv_cache == "v41" else {}
    model = make_model(**layer_changes[4], hc_sinkhorn_iters=2, **dims)
    runs = [new_run(model, 2, 3, (3,), kv_cache=kv_cache, bounded=(m, KEEP)) for m in MODES]
    lengths = (5, 14, 30, 53)
    for length in lengths:
        found = []
        for run in runs:
            run.reset()
            begin(run, 1, make_prompt(length, length), (16, 7))
            before = run.readable(1)
            for total in (1, 3, 3):
                run.decode([1], total)
            found.append((before, run.texts[1], torch.stack(run.logits[1])))
        (mask, text, logits), (compact, other_text, other_logits) = found
        for name, tensor in mask.items():
            if name not in ("slots.drafts", "slots.confidence"):
                torch.testing.assert_close(compact[name], tensor, rtol=0, atol=ATOL, msg=name)
        assert text == other_text
        torch.testing.assert_close(other_logits, logits, rtol=0, atol=ATOL)


@pytest.mark.parametrize("mode", MODES)
def test_keeping_all_is_an_exact_prefill(make_bounded, make_prompt, mode):
    run = make_bounded(mode, keep=64)
    begin(run, 1, make_prompt(53, 2), (16, 5))
    for total in (1, 3, 3, 3):
        run.decode([1], total)
    run.check_greedy()


def test_rows_left_out_by_chunk():
    """A prompt of 1,000 tokens of which 140 are kept, in chunks (start, tokens)."""

    class Config:
        sliding_window = 128

    for start, count, kept in ((0, 300, 0), (300, 300, 0), (600, 300, 40), (900, 100, 100)):
        region = bounded_regions(Config(), "compact")["keep_rows"].function
        size = 300
        index = torch.arange(size)
        valid = index < count
        positions = (start + index).where(valid, 0)
        window = (index.unsqueeze(1) + 1 + torch.arange(128)).where(valid.unsqueeze(1), -1)
        ints = [positions, valid * 1, valid, 128 + index, window, index, positions, positions]
        floats = [torch.rand(size, 2) for _ in range(5)]
        outs = [torch.full_like(tensor[:140], 7) for tensor in (*ints, *floats)]
        region(torch.tensor([860]), *ints, *floats, *outs)
        assert int(outs[2].sum()) == kept
        left = list(range(max(start, 860), start + count))
        assert outs[0][:kept].tolist() == left
        assert not outs[0][kept:].any() and (outs[4][kept:] == -1).all()
        seen = (outs[4][:kept] >= 0).sum(1).tolist()
        assert seen == [min(128, position - 859) for position in left]
        assert torch.equal(outs[8][:kept], floats[0][count - kept : count])


@pytest.mark.parametrize(
    ("changes", "keep", "message"),
    [
        ({}, 10, "keep_tokens is 10; .* at least 11 .*sliding_window 8 .* 2"),
        ({"dspark_target_layer_ids": [1, 3]}, 12, "taps from layer 2 on"),
        ({"engram_layer_ids": [2]}, 12, "Engram layers below 2"),
    ],
)
def test_models_and_numbers_that_do_not_fit(make_model, layer_changes, changes, keep, message):
    config = make_model(**{**layer_changes[4], **changes}).config
    check_bounded_replay(config, "off", 0, 2)
    with pytest.raises(ValueError, match=message):
        check_bounded_replay(config, "compact", keep, 2)
