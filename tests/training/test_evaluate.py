"""The card's figures on a small model, against plain computations."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from decodegrid.graphs.drafter import DraftModel
from training.batches import Rows
from training.evaluate import SEED, measure
from training.sample import generate

MakeModel = Callable[..., DraftModel]
STORED_SIZES = {"moe_intermediate_size": 32, "head_dim": 32, "index_head_dim": 32}
STORED_SIZES |= {"engram_head_dim": 32}
"""Block formats want multiples of 32."""


def write_data(directory: Path) -> np.ndarray:
    """One held-out domain of 3 bytes a token; returns its stream."""
    draw = np.random.default_rng(0)
    stream = np.concatenate([np.r_[0, draw.integers(3, 90, 26)] for _ in range(20)])
    np.save(directory / "heldout_x.npy", stream.astype(np.uint16))
    np.save(directory / "heldout_x_answers.npy", np.arange(len(stream)) % 16 < 12)
    part = {"tokens": len(stream), "bytes": 3 * len(stream), "documents": 20}
    meta = {"bos_token_id": 0, "domains": {"train": {}, "heldout_x": {"part": part}}}
    (directory / "meta.json").write_text(json.dumps(meta))
    return stream.astype(np.uint16)


def test_measured_loss_is_the_models(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model(6, **STORED_SIZES)
    stream = write_data(tmp_path)
    report = measure(model, tmp_path, length=32, num_rows=4)
    ids, targets = Rows(stream, 32, 0, SEED).batch(0, 4)
    losses = [
        F.cross_entropy(model.logits(row), wanted, ignore_index=-100, reduction="sum")
        for row, wanted in zip(ids, targets, strict=True)
    ]
    count = int((targets >= 0).sum())
    expected = float(sum(losses)) / count
    domain = report.domains["x"]
    assert domain.tokens == count < 4 * 32
    assert abs(domain.nats_per_token - expected) < 1e-4
    marks = np.arange(len(stream)) % 16 < 12
    answers = Rows(stream, 32, 0, SEED, marks).answer_targets(0, 4) & (targets >= 0)
    each = [
        F.cross_entropy(model.logits(row), wanted, ignore_index=-100, reduction="none")
        for row, wanted in zip(ids, targets, strict=True)
    ]
    expected_answers = float(torch.stack(each)[answers].mean())
    assert abs(domain.answer_nats_per_token - expected_answers) < 1e-4
    assert 0 < abs(domain.stored_nats_per_token - expected) < 0.2
    assert abs(domain.bits_per_byte - expected / 3 / math.log(2)) < 1e-4
    figures = [*domain.acceptance["1"], *domain.acceptance["0.6"], *domain.confidence]
    assert len(figures) == 15 and all(0 < figure < 1 for figure in figures)
    # A sharper pair of distributions overlaps less when the two are unrelated.
    assert sum(domain.acceptance["0.6"]) < sum(domain.acceptance["1"])
    assert set(report.index_recall) == {"1", "3", "4", "6"}
    for layer, share in report.index_recall.items():
        assert 0 < share <= report.index_ceiling[layer] < 1
    assert len(report.expert_load) == 8 and min(report.expert_load) >= 1


def test_generate_greedy_follows_the_argmax(make_model: MakeModel) -> None:
    model = make_model(6)
    new = generate(model, [0, 5, 9], 4, 0.0, 0)
    text = [0, 5, 9]
    for token in new:
        assert token == int(model.logits(torch.tensor(text))[-1].argmax())
        text.append(token)
    assert len(new) == 4 or new[-1] == model.config.eos_token_id
