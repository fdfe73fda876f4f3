"""Log-probabilities of a rich step and of a prompt, against the uncached float64 forward."""

import numpy as np
import pytest
import torch

from decodegrid.engine.runner_protocol import MAX_TOP_LOGPROBS, RichRequest

DRAFTS, VOCAB = 3, 96
ASKED = {
    "logit_bias": {4: 7.0}, "presence_penalty": 1.0, "frequency_penalty": 0.5,
    "repetition_penalty": 1.2, "min_seq_len": 30, "banned_before": (1, 2), "output_token_ids": (),
}
"""All of it changes what is chosen and nothing of what is reported."""


def check(found, logits, tokens):
    """chosen, top ids and top values of rows of raw logits."""
    chosen, top_ids, top_logprobs = (np.asarray(part) for part in found)
    wanted = logits.log_softmax(-1).numpy()
    assert chosen.dtype == top_logprobs.dtype == np.float32
    for row, token in enumerate(tokens):
        order = sorted(range(VOCAB), key=lambda i: (-wanted[row, i], i))[:MAX_TOP_LOGPROBS]
        assert top_ids[row].tolist() == order
        np.testing.assert_allclose(chosen[row], wanted[row, token], atol=2e-6)
        np.testing.assert_allclose(top_logprobs[row], wanted[row, order], atol=2e-6)


def decode_reported(run, slots, totals):
    """What steps report of each slot, cut to what they emit."""
    found = {slot: ([], [], []) for slot in slots}
    for total in totals:
        result = run.decode(slots, total)
        assert result.logprobs is not None
        parts = result.logprobs.chosen, result.logprobs.top_ids, result.logprobs.top_logprobs
        for row, slot in enumerate(slots):
            count = int(result.num_emitted[row])
            for kept, part in zip(found[slot], parts, strict=True):
                kept += list(part[row, :count])
    return found


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_of_emitted_tokens(rich_run, make_prompt, verify):
    """At every position of every draft length, beside rows that ask for none."""
    run = rich_run(verify=verify)
    for slot, num_top in ((1, 20), (2, -1), (3, 0)):
        prompt = make_prompt(4 + 3 * slot, slot)
        rich = RichRequest(**ASKED, prompt_token_ids=prompt, num_top_logprobs=num_top)
        run.begin(slot, prompt, temperature=0.7, seed=slot, asked={"rich": rich})
    run.begin(4, make_prompt(6, 4))
    found = decode_reported(run, [3, 4, 1, 2], (4, 16, 9, 16, 4, 16))
    assert run.accepted > 0
    for slot in (1, 3):
        check(found[slot], run.reference_logits(slot), run.emitted(slot))
    for slot in (2, 4):
        assert {int(token) for row in found[slot][1] for token in row} == {-1}


def test_the_same_with_and_without_drafts(rich_run, make_prompt):
    """Of the same text."""
    reports = []
    for totals in ((1,) * 10, (1, 4, 4, 4, 4, 4, 4, 4, 4, 4)):
        run, prompt = rich_run(), make_prompt(7, 1)
        rich = RichRequest(**ASKED, prompt_token_ids=prompt, num_top_logprobs=5)
        run.begin(2, prompt, temperature=0.7, asked={"rich": rich})
        found = decode_reported(run, [2], totals)
        reports.append([np.array(part[:10]) for part in found[2]])
    assert run.accepted > 0
    for without, drafted in zip(*reports, strict=True):
        np.testing.assert_allclose(without, drafted, atol=1e-6)


def test_a_fused_step_reports_nothing(rich_run, make_prompt):
    run = rich_run()
    run.begin(1, make_prompt(5, 1))
    assert run.decode([1], 1).logprobs is None


@pytest.mark.parametrize("num_drafts, rows", [(3, 4), (2, 1)])
def test_of_a_prompt(rich_run, make_prompt, num_drafts, rows):
    """Chunks of every padding; with 6 rows of logits a chunk of 16 takes three slices, the last of
    which overlaps. The state is that of a prefill without a report."""
    run = rich_run(num_drafts, max_num_reqs=rows, req_sizes=(rows,))
    prompt, slot, start = make_prompt(37, 3), 1, 0
    run.begin(slot, prompt, (16, 3, 4, 1, 12))
    want = run.readable(slot)
    run.reset()
    run.blocks[slot] = list(range(1, 9))
    logits = run.model.logits(torch.tensor(prompt))
    for size in (16, 3, 4, 1, 12):
        end = start + size
        following = prompt[start + 1 : end + 1]
        found = run.runner.prefill(
            slot, prompt[start:end], start, run.history(prompt, start), run.blocks[slot], following
        )
        check(
            (found.chosen, found.top_ids, found.top_logprobs), logits[start:end], following
        )
        assert len(found.chosen) == size
        start = end
    run.start(slot, prompt)
    run.assert_close(run.readable(slot), want)
