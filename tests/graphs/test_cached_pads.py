"""Pad rows and surplus tokens are inert: poison reaches nothing live, and nothing live is missed.

Poison is NaN in every float and numbers far outside every table in every integer, in the null slot,
the null block, all slots and blocks that the batch does not own, and all buffers between regions.
"""

from dataclasses import fields

import numpy as np
import pytest
import torch

from decodegrid.engine.runner_protocol import RichRequest

LIVE = (2, 5, 7)
BLOCK_SIZE = 8
HUGE = 2**61
RICH = RichRequest({3: 1.5}, 0.5, 0.3, 1.2, 20, (4, 9), (1, 9, 9), (2,), 20, has_grammar=True)


def fill(tensor, value):
    """NaN, `value` or True. Records of NaN: code 255 in every format, as are the scales."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.uint8:
        tensor.fill_(255)
    elif tensor.dtype == torch.bool:
        tensor.fill_(value > 0)
    elif tensor.dtype == torch.int32:
        tensor.fill_(max(min(value, 2**31 - 1), -(2**31)))
    else:
        tensor.fill_(value)


def owned_rows(run, name, tensor):
    """Bool mask over the rows of a state tensor: those of live slots and of their blocks."""
    state, config = run.runner.model.state, run.runner.model.config
    mask = torch.zeros(tensor.shape[0], dtype=torch.bool)
    if name.startswith("pools.") and not name.endswith("compressor"):
        per_block = BLOCK_SIZE // config.compress_ratios[int(name.split(".")[1])]
        for slot in LIVE:
            for block in run.blocks[slot]:
                mask[block * per_block : (block + 1) * per_block] = True
        return mask
    if tensor.shape[0] % state.capacity.num_slots:
        return mask  # the two unused compressor rows of a ratio-1 source
    per_slot = tensor.shape[0] // state.capacity.num_slots
    for slot in LIVE:
        mask[slot * per_slot : (slot + 1) * per_slot] = True
    return mask


def poison_state(run, value):
    """Everything that no live slot owns."""
    for name, tensor in run.runner.model.state.tensors():
        rest = tensor[~owned_rows(run, name, tensor)]
        fill(rest, value)
        tensor[~owned_rows(run, name, tensor)] = rest


def poison_buffers(run, value):
    """Everything between regions and all outputs, constants apart. The runner writes inputs."""
    buffers = run.runner.buffers

    def walk(part):
        for item in fields(part):
            tensor = getattr(part, item.name)
            if item.name == "draft_steps":
                continue
            if isinstance(tensor, torch.Tensor):
                fill(tensor, value)
            elif isinstance(tensor, tuple):
                for one in tensor:
                    fill(one, value)
            elif tensor is not None:
                walk(tensor)

    walk(buffers)
    buffers.rows.slots.zero_()


def begin_rows(run, make_prompt):
    for slot, length in zip(LIVE, (13, 22, 3), strict=True):
        asked = {"rich": RICH} if run.runner.has_rich and slot != 2 else {}
        prompt, heat = make_prompt(length, 200 + length), 0.6 * (slot == 5)
        run.begin(slot, prompt, temperature=heat, seed=5, asked=asked)
    run.decode(LIVE, 3)
    return run.snapshot()


def live_state(run):
    return {
        name: tensor[owned_rows(run, name, tensor)].clone()
        for name, tensor in run.runner.model.state.tensors()
    }


@pytest.mark.parametrize(
    "verify, kv_cache, total, value",
    [("coupled", "compute", total, value) for total in (3, 7, 14) for value in (HUGE, -HUGE, -1)]
    + [("coupled", "v41", total, HUGE) for total in (3, 7, 14)]
    + [("rejection", "compute", 3, HUGE), ("rejection", "compute", 14, -HUGE)]
    + [("rejection", "compute", 14, -1)],
)
def test_poison_reaches_nothing_live(make_run, make_prompt, verify, kv_cache, total, value):
    """3 rows in a pair of 8 rows; totals below a captured size leave surplus tokens too."""
    run = make_run(req_sizes=(8,), verify=verify, kv_cache=kv_cache)
    snapshot = begin_rows(run, make_prompt)
    clean = run.decode(LIVE, total)
    want, texts = live_state(run), dict(run.texts)
    logits = {slot: torch.stack(rows) for slot, rows in run.logits.items()}
    run.restore(snapshot)
    poison_buffers(run, value)
    poison_state(run, value)
    result = run.decode(LIVE, total)
    assert result.key.num_reqs == 8 and result.key.num_query_tokens >= total
    assert result.num_query_tokens == total
    assert result.num_emitted.tolist() == clean.num_emitted.tolist()
    assert run.texts == texts
    for slot in LIVE:
        assert torch.equal(torch.stack(run.logits[slot]), logits[slot])
    for name, tensor in live_state(run).items():
        assert torch.equal(tensor, want[name]), name


@pytest.mark.parametrize(
    "verify, total, value",
    [("coupled", 3, HUGE), ("coupled", 14, -HUGE), ("coupled", 14, -1), ("rejection", 14, HUGE)],
)
def test_poison_reaches_no_rich_row(make_run, make_prompt, verify, total, value):
    """The same for a step with two rich rows and a plain one, whose masks the host writes."""
    run = make_run(req_sizes=(8,), verify=verify, rich=True)
    snapshot = begin_rows(run, make_prompt)
    masks = np.full((3, 6, 3), -1 ^ (1 << 9), dtype=np.int32)
    clean = run.decode(LIVE, total, masks)
    want, texts = live_state(run), dict(run.texts)
    run.restore(snapshot)
    poison_buffers(run, value)
    poison_state(run, value)
    result = run.decode(LIVE, total, masks)
    assert result.key.num_reqs == 8 and result.num_query_tokens == total
    assert run.texts == texts
    for row, count in enumerate(clean.num_emitted.tolist()):
        for name in ("chosen", "top_ids", "top_logprobs"):
            one, other = getattr(result.logprobs, name), getattr(clean.logprobs, name)
            assert np.array_equal(one[row, :count], other[row, :count]), name
    for name, tensor in live_state(run).items():
        assert torch.equal(tensor, want[name]), name


def test_rubbish_in_rows_that_are_not_rich(make_run, make_prompt):
    """What earlier rich requests left in a slot reaches no plain row of a rich step: it is the
    fused step's, bit for bit."""
    found = []
    for kind in ("fused", "rich", "rubbish"):
        run = make_run(req_sizes=(8,), rich=True)
        for slot in LIVE:
            run.begin(slot, make_prompt(4 + slot, slot), temperature=0.6, seed=slot)
        if kind == "rubbish":
            state = run.runner.model.state.rich
            for name in type(state).__slots__:
                if name != "enabled":
                    fill(getattr(state, name), HUGE)
        for total in (3, 18, 9):
            if kind == "fused":
                run.decode(LIVE, total)
                continue
            step = run.runner.launch_forward(LIVE, total)
            run.runner.launch_choice(step, np.zeros((3, 6, 3), dtype=np.int32))
            run.runner.collect(step)
        slots = run.runner.model.state.slots
        found.append([getattr(slots, name)[list(LIVE)] for name in type(slots).__slots__])
    for fused, rich, rubbish in zip(*found, strict=True):
        assert torch.equal(fused, rich) and torch.equal(fused, rubbish)


def test_a_rich_step_writes_nothing_else(make_run, make_prompt):
    run = make_run(req_sizes=(8,), rich=True)
    before = begin_rows(run, make_prompt)
    run.decode(LIVE, 14)
    check_untouched(run, before)


@pytest.mark.parametrize(
    "verify, kv_cache", [("coupled", "compute"), ("rejection", "compute"), ("coupled", "v41")]
)
@pytest.mark.parametrize("total", [3, 14])
def test_a_decode_step_writes_nothing_else(make_run, make_prompt, total, verify, kv_cache):
    """Outside the live slots, their blocks and the null ones no bit changes (C12)."""
    run = make_run(req_sizes=(8,), verify=verify, kv_cache=kv_cache)
    before = begin_rows(run, make_prompt)
    run.decode(LIVE, total)
    check_untouched(run, before)


def check_untouched(run, before):
    state, config = run.runner.model.state, run.runner.model.config
    changed = 0
    for name, tensor in state.tensors():
        rest = ~owned_rows(run, name, tensor)
        changed += int((tensor[~rest] != before.tensors[name][~rest]).sum())
        if "keys" in name:
            rest[: BLOCK_SIZE // config.compress_ratios[int(name.split(".")[1])]] = False
        elif tensor.shape[0] % state.capacity.num_slots == 0:
            rest[: tensor.shape[0] // state.capacity.num_slots] = False
        assert torch.equal(tensor[rest], before.tensors[name][rest]), name
    assert changed > 0


def test_a_chunk_writes_nothing_else(make_run, make_prompt):
    """A prefill chunk with pads beside live slots."""
    run = make_run(req_sizes=(8,))
    before = begin_rows(run, make_prompt)
    run.runner.prefill(5, make_prompt(11, 1), 0, (-1, -1, -1), run.blocks[5])
    check_untouched(run, before)
    after = {slot: run.readable(slot) for slot in (2, 7)}
    run.restore(before)
    for slot, want in after.items():
        run.assert_equal(run.readable(slot), want)


@pytest.mark.parametrize(
    "value, kv_cache", [(HUGE, "compute"), (-HUGE, "compute"), (HUGE, "v41")]
)
def test_poison_around_a_chunk(make_run, make_prompt, value, kv_cache):
    """Prefill of 3 + 5 + 11 tokens, each padded, from poisoned buffers and null rows."""
    run = make_run(req_sizes=(8,), kv_cache=kv_cache)
    prompt = make_prompt(20, 7)
    for slot in LIVE:
        run.begin(slot, prompt, (3, 5, 11))
    want = run.readable(LIVE[0])
    for _ in run.prefill(LIVE[0], prompt, (3, 5, 11)):
        poison_buffers(run, value)
        poison_state(run, value)
    run.start(LIVE[0], prompt)
    got = run.readable(LIVE[0])
    run.assert_close(got, want)
    for name, tensor in want.items():
        if not name.startswith("slots."):
            assert torch.equal(got[name], tensor), name


def test_the_last_block_while_the_batch_pads(make_run, make_prompt):
    """The last block of the pool is in use by a row that sits out; padded steps leave it (C13)."""
    run = make_run(req_sizes=(8,))
    last = run.runner.num_blocks - 1
    run.blocks[3] = [last, 17, 18]
    run.begin(3, make_prompt(6, 3))
    want = run.readable(3)
    run.begin(2, make_prompt(9, 4))
    for total in (1, 2, 6, 6):
        run.decode([2], total)
    run.assert_equal(run.readable(3), want)
    run.decode([3], 1)
    run.decode([3, 2], 5)
    run.check_greedy()
