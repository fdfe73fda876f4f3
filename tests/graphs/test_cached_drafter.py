"""Drafts of the cached drafter against the uncached one, from short and long contexts."""

import pytest
import torch

from decodegrid.kernels.sampling import choose_tokens

WINDOW = 8


@torch.no_grad()
def uncached_round(run, text, num_drafts, temperature, seed):
    """Draft ids and confidences after `text`, from taps of an uncached forward."""
    kv_cache = run.runner.model.state.capacity.kv_cache
    model, known, anchor = run.model, text[:-1], len(text) - 1
    first = max(0, len(known) - WINDOW)
    if known:
        taps = model.forward(torch.tensor([known]), kv_cache=kv_cache).taps
        positions = torch.arange(len(known)).unsqueeze(0)
        keys = model.context_keys(model.draft_context(taps), positions, kv_cache)
        keys = [layer[:, first:] for layer in keys]
    else:
        keys = [torch.zeros(1, 0, model.config.head_dim, dtype=torch.float64) for _ in model.mtp]
    live = torch.ones(1, len(known) - first, dtype=torch.bool)
    last, at = torch.tensor([text[-1]]), torch.tensor([anchor])
    hidden = model.draft_hidden(last, at, keys, live, kv_cache)[0]
    base = model.draft_base_logits(hidden)
    previous, tokens, rates = torch.tensor([text[-1]]), [], []
    for step in range(num_drafts):
        embedded, bias = model.markov(previous)
        raw = model.confidence_logit(hidden[step : step + 1], embedded)
        rates.append(torch.sigmoid(raw))
        previous = choose_tokens(
            base[step : step + 1] + bias,
            torch.tensor([temperature], dtype=torch.float64),
            torch.tensor([seed]),
            torch.tensor([len(text) + step]),
        )
        tokens.append(int(previous))
    return tokens, torch.cat(rates)


def check_drafts(run, slots, temperature, seed):
    """The drafts and confidences in the slots are those of the uncached drafter."""
    row = run.runner.model.state.slots
    num_drafts = run.runner.num_draft_tokens
    for slot in slots:
        want, rates = uncached_round(run, run.texts[slot], num_drafts, temperature, seed)
        assert int(row.num_drafts[slot]) == num_drafts
        assert row.drafts[slot].tolist() == want
        torch.testing.assert_close(row.confidence[slot], rates, rtol=0, atol=1e-10)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("num_drafts, kv_cache", [(3, "compute"), (5, "compute"), (5, "v41")])
def test_drafts_equal_the_uncached_round(make_run, make_prompt, num_drafts, temperature, kv_cache):
    """A batch of 2, contexts from 0 keys to several windows, after acceptance and rejection."""
    req_sizes = (8,) if num_drafts == 3 else (1, 3)
    run = make_run(num_drafts=num_drafts, req_sizes=req_sizes, kv_cache=kv_cache)
    run.begin(1, make_prompt(1, 31), temperature=temperature, seed=9)
    run.begin(2, make_prompt(29, 32), temperature=temperature, seed=9)
    for step in range(8):
        run.decode([1, 2], 2 * (num_drafts + 1) if step % 3 else 2)
        check_drafts(run, (1, 2), temperature, 9)
    assert run.verified > run.accepted
    assert len(run.texts[1]) > WINDOW


def test_drafts_of_the_first_step_of_every_short_prompt(make_run, make_prompt):
    """Prompts of 1 to 10 tokens: contexts shorter than, equal to and longer than the window."""
    run = make_run()
    for first in (1, 4, 8):
        lengths = range(first, first + 3)
        for slot, length in enumerate(lengths, start=1):
            run.begin(slot, make_prompt(length, length))
        run.decode([1, 2, 3], 3)
        check_drafts(run, (1, 2, 3), 0.0, 0)


def test_right_drafts_leave_the_same_drafter_context(make_run, make_prompt):
    """After five accepted drafts the next drafts are those of the uncached round too."""
    run = make_run()
    prompt = make_prompt(14, 33)
    run.begin(1, prompt)
    for _ in range(12):
        run.decode([1], 1)
    greedy = run.emitted(1)
    run.reset()
    run.begin(1, prompt)
    run.decode([1], 1)
    run.force_drafts(1, greedy[1:6])
    run.decode([1], 6)
    assert run.accepted == 5
    check_drafts(run, (1,), 0.0, 0)


def test_a_stopped_row_loses_its_drafts(make_run, make_prompt):
    """A stop token among the emitted ones sets the flag; the other row keeps its rates. A step that
    was launched all the same gives the stopped row one query token, however many there are."""
    run = make_run()
    run.begin(1, make_prompt(14, 33))
    run.begin(2, make_prompt(9, 34))
    run.decode([1, 2], 2)
    slots, stopped = run.runner.model.state.slots, run.runner.buffers.rows.stopped
    snapshot = run.snapshot()
    run.decode([1, 2], 2)
    assert not stopped[:2].any()
    rates = slots.confidence[1:3].clone()
    assert bool((rates > 0).all())
    stop = run.texts[1][-1]
    assert stop != run.texts[2][-1]
    run.restore(snapshot)
    slots.stop_token_ids[1:3, 4] = stop
    run.decode([1, 2], 2)
    assert stopped[:2].tolist() == [True, False]
    assert slots.confidence[1].tolist() == [0.0] * 5
    assert torch.equal(slots.confidence[2], rates[1])
    run.runner.decode([1, 2], 12)
    assert run.runner.buffers.rows.query_lens[:2].tolist() == [1, 6]


def test_draft_temperatures_divide_the_logit(make_run, make_prompt):
    """Confidence is the sigmoid of the logit over the divisor of its place."""
    divisors = (0.5, 1.0, 2.0, 3.0, 4.0)
    run = make_run(max_num_reqs=2, req_sizes=(2,), draft_temperatures=divisors)
    run.begin(1, make_prompt(9, 35))
    run.decode([1], 1)
    _, rates = uncached_round(run, run.texts[1], 5, 0.0, 0)
    assert rates.min() > 0.001 and rates.max() < 0.999
    want = torch.logit(rates) / torch.tensor(divisors, dtype=torch.float64)
    got = torch.logit(run.runner.model.state.slots.confidence[1])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
