"""A cache of records: every way to a text leaves the same bytes, and the uncached forward that
rounds at the same places agrees with it.

Two places that are wrong on purpose show that the agreement is a test of the places.
"""

import dataclasses
import random

import pytest
import torch

from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.graphs import model as model_module
from decodegrid.graphs.attention import Attention
from decodegrid.graphs.checkpoint import checkpoint_path
from decodegrid.graphs.kv_cache import check_channels, key_codec
from decodegrid.graphs.model_config import parse_model_config
from decodegrid.kernels.norm_rope import apply_rope, rope_angles
from decodegrid.kernels.records import RecordFormat, round_records

VOCAB = 96
OPENINGS = (
    "Once upon a time there was a little fox who",
    "Tom and Lily went to the park. They saw",
    "One day, a big red ball",
    "The old man had a boat. Every morning",
)


def decode_along(run, slot, text, draw):
    """Decode a slot to the end of a text: drafts of it up to a random place, wrong from there."""
    length = len(text)
    while len(run.texts[slot]) < length:
        done, place = len(run.texts[slot]), draw.randint(0, 5)
        right = [*text[done:], *[0] * 5][:5]
        run.force_drafts(slot, [(t + (i >= place)) % VOCAB for i, t in enumerate(right)])
        run.decode([slot], min(draw.randint(1, 6), length - done))


def test_every_way_to_a_text_leaves_the_same_records(make_run, make_prompt):
    """One token at a time, verify blocks with rejections, chunks: no byte differs at 52 tokens.

    The window, the first pair, top-k and candidates lie behind it.
    """
    run = make_run(kv_cache="v41")
    prompt = make_prompt(2, 77)
    run.begin(1, prompt)
    while len(run.texts[1]) < 52:
        run.decode([1], 1)
    run.check_greedy()
    want, text = run.readable(1), run.texts[1]
    logits = torch.stack(run.logits[1])
    assert want["window.0"].shape[1] == 33 and want["keys.1"].shape == (25, 18)
    assert want["index_keys.4"].shape == (51, 17)
    run.begin(2, prompt)
    decode_along(run, 2, text, random.Random(1))
    assert run.texts[2] == text and 0 < run.accepted < run.verified
    assert (torch.stack(run.logits[2]) - logits).abs().max() < 1e-9
    run.check_greedy()
    for slot, sizes in ((3, ()), (4, (1,) * 9), (5, (3, 16, 1, 7, 2, 2, 15))):
        run.begin(slot, text, sizes)
    flips = {}
    for slot in (2, 3, 4, 5):
        got = run.readable(slot)
        for name in want:
            if want[name].dtype == torch.uint8:
                flips[slot, name] = int((got[name] != want[name]).sum())
    print(f"bytes that differ: {sum(flips.values())}")
    assert len(flips) == 4 * (10 + 2 * 3)
    assert not any(flips.values())


def test_records_are_what_is_stored(make_run):
    """A rounding that kept the values would pass every other test here at any size."""
    state = make_run(kv_cache="v41").runner.model.state
    plain = make_run(head_dim=32, index_head_dim=32).runner.model.state
    keys = [n for n, _ in state.tensors() if "window" in n or n.endswith("keys")]
    tensors, wide = dict(state.tensors()), dict(plain.tensors())
    assert len(keys) == 10 + 2 * 3
    for name in keys:
        assert tensors[name].dtype == torch.uint8 and wide[name].dtype == torch.float64
        assert tensors[name].shape[0] == wide[name].shape[0]
    saved = sum(wide[n].nbytes - tensors[n].nbytes for n in keys)
    assert plain.num_bytes() - state.num_bytes() == saved > 0
    assert tensors["pools.1.compressor"].dtype == torch.float64


@pytest.mark.parametrize("field", ["head_dim", "index_head_dim"])
def test_keys_that_fill_no_blocks_are_refused(make_run, field):
    with pytest.raises(ValueError, match=rf"cache\.kv_cache is v41.*\b{field} is 16"):
        make_run(kv_cache="v41", **{field: 16})
    make_run(kv_cache="compute", **{field: 16})


def test_index_keys_do_not_count_without_a_source(make_raw):
    nothing = {"kv_source_layer_ids": [], "index_source_layer_ids": []}
    ratios = {"compress_ratios": [0] * 10, "candidate_source_layer_id": None}
    config = parse_model_config(make_raw(head_dim=32, **nothing, **ratios))
    check_channels(config, "v41")
    with pytest.raises(ValueError, match="index_head_dim is 16"):
        check_channels(parse_model_config(make_raw(head_dim=32)), "v41")


@pytest.fixture(scope="module")
def written(embedded_records_run):
    """The embedded model's run with four texts of 100 sampled tokens each, drafts among them."""
    run = embedded_records_run
    tokenizer = Tokenizer(checkpoint_path("tiny") / "tokenizer.json")
    for slot, opening in enumerate(OPENINGS, start=1):
        prompt = [tokenizer.bos_token_id, *tokenizer.encode(opening)]
        run.begin(slot, prompt, temperature=1.0, seed=slot)
    while waiting := [slot for slot in run.texts if len(run.emitted(slot)) < 100]:
        run.decode(waiting, 6 * len(waiting))
    assert 0 < run.accepted < run.verified
    return run


def agreement(run):
    """Share of emitted places at which the uncached forward has the same best token."""
    same = [
        torch.stack(rows).argmax(-1) == run.reference_logits(slot).argmax(-1)
        for slot, rows in run.logits.items()
    ]
    return float(torch.cat(same).double().mean()), sum(part.numel() for part in same)


def test_agreement_with_the_rounding_oracle(written, capsys):
    """Teacher-forced, float32, the steps' kernels and shapes apart from the oracle's."""
    share, count = agreement(written)
    with capsys.disabled():
        difference = written.worst_difference()
        print(f"\nsame argmax: {share:.2%} of {count}; largest logit difference {difference:.1e}")
    assert count >= 400 and share >= 0.995


def rounds_windows_to_fp4(monkeypatch):
    """Window keys in the format of compressed ones."""
    codec = dataclasses.replace(
        key_codec("v41", as_ops=False),
        round=lambda x, form: round_records(x, 1 if form == RecordFormat.Q8 else form),
    )
    monkeypatch.setattr(model_module, "key_codec", lambda *_, **__: codec)


def rounds_before_the_rotation(monkeypatch):
    """Compressed keys rounded too early; index keys as they should be."""

    def add_compressed(self, x, shared):
        latent = self.compressor.norm(self.compressor.pooled(x))
        cos, sin = rope_angles(torch.arange(latent.shape[1]) * self.ratio, self.frequencies)
        shared.compressed = apply_rope(round_records(latent, RecordFormat.Q4N), cos, sin)
        shared.index_keys = round_records(self.index_keys(latent, cos, sin), RecordFormat.Q4X)

    monkeypatch.setattr(Attention, "_add_compressed", add_compressed)


def rounds_nothing(monkeypatch):
    """An oracle whose cache is in float32."""
    codec = key_codec("compute", as_ops=False)
    monkeypatch.setattr(model_module, "key_codec", lambda *_, **__: codec)


@pytest.mark.parametrize("plant", [rounds_windows_to_fp4, rounds_nothing])
def test_a_rounding_at_a_wrong_place_is_seen(written, monkeypatch, capsys, plant):
    plant(monkeypatch)
    share, count = agreement(written)
    with capsys.disabled():
        print(f"\n{plant.__name__}: {share:.2%} of {count}")
    assert share < 0.995


@pytest.mark.parametrize(
    "plant", [rounds_windows_to_fp4, rounds_before_the_rotation, rounds_nothing]
)
def test_float64_sees_what_changes_no_choice(make_run, make_prompt, monkeypatch, plant):
    """Few channels turn, so that too early a rounding moves logits rather than the best token."""
    run = make_run(kv_cache="v41")
    run.begin(1, make_prompt(30, 5))
    for total in (1, 6, 6):
        run.decode([1], total)
    run.check_greedy()
    plant(monkeypatch)
    assert run.worst_difference() > 1e-6


def test_compiled_steps_over_records(compiled_records_run, make_prompt, monkeypatch, capsys):
    """Native ops in generated code: the oracle's choices, in its float32 and float64 forms."""
    run, slots = compiled_records_run, (1, 2, 3)
    run.reset()
    for slot, length in zip(slots, (5, 20, 33), strict=True):
        run.begin(slot, make_prompt(length, 40 + length))
    while min(len(run.emitted(slot)) for slot in slots) < 70:
        run.decode(slots, 6)
    assert run.verified > 0 and run.runner.num_compilations == 5
    share, count = agreement(run)
    with capsys.disabled():
        worst = run.worst_difference()
        print(f"\ncompiled: same argmax {share:.2%} of {count}; largest difference {worst:.1e}")
    assert count >= 210 and share >= 0.995
    monkeypatch.setattr(run, "oracle", run.model)
    assert agreement(run)[0] >= 0.995
