"""Drafter training: rounds, the fast parallel part, the losses, and a short run."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decodegrid.graphs.checkpoint import load_model
from decodegrid.graphs.drafter import DraftModel
from training.batches import IGNORED, Rows
from training.draft_forward import (
    context_of,
    draft_hidden,
    draft_logits,
    draft_loss,
    pick_rounds,
    slot_losses,
)
from training.fast_forward import FastForward
from training.run_log import Log, last_row
from training.schedule import Plan, Progress, progress_of
from training.tiny_config import TOKENIZER
from training.train_drafter import (
    DrafterTrainer,
    DraftPlan,
    run,
    start_from_target,
    start_model,
)

MakeModel = Callable[..., DraftModel]
STORED_SIZES = {"moe_intermediate_size": 32, "head_dim": 32, "index_head_dim": 32}
STORED_SIZES |= {"engram_head_dim": 32}
"""Block formats want multiples of 32."""


def make_rows() -> tuple[Tensor, Tensor]:
    """Ids with a document start inside the second row, and their targets."""
    whole = torch.randint(3, 90, (2, 41), generator=torch.Generator().manual_seed(2))
    whole[1, 30] = 0
    targets = whole[:, 1:].clone()
    targets[targets == 0] = IGNORED
    return whole[:, :-1], targets


def test_rounds_name_the_right_tokens() -> None:
    ids, targets = make_rows()
    answers = torch.ones_like(ids, dtype=torch.bool)
    rounds = pick_rounds(ids, targets, answers, 5, 34, torch.Generator().manual_seed(0))
    assert sorted(rounds.positions[rounds.rows == 0].tolist()) == list(range(1, 35))
    for n in range(len(rounds.anchors)):
        row, at = int(rounds.rows[n]), int(rounds.positions[n])
        assert rounds.anchors[n] == ids[row, at]
        assert rounds.previous[n].tolist() == ids[row, at : at + 5].tolist()
        for slot in range(5):
            ends = row == 1 and at < 30 <= at + 1 + slot
            assert bool(rounds.live[n, slot]) is not ends
            if not ends:
                assert rounds.drafted[n, slot] == targets[row, at + slot]


def test_rounds_draft_answers_only() -> None:
    ids, targets = make_rows()
    answers = torch.zeros_like(ids, dtype=torch.bool)
    answers[:, 8:20] = True
    rounds = pick_rounds(ids, targets, answers, 5, 12, torch.Generator().manual_seed(0))
    assert sorted(rounds.positions[rounds.rows == 0].tolist()) == list(range(8, 20))
    for n, at in enumerate(rounds.positions.tolist()):
        assert rounds.live[n].tolist() == [at + slot < 20 for slot in range(5)]


def test_draft_hidden_equals_the_models(make_model: MakeModel) -> None:
    """Context keys are those strictly before the anchor, one window of them."""
    model = make_model(4)
    ids, targets = make_rows()
    taps = model(ids).taps
    answers = torch.ones_like(ids, dtype=torch.bool)
    rounds = pick_rounds(ids, targets, answers, 5, 6, torch.Generator().manual_seed(1))
    keys, live = context_of(model, taps, rounds)
    hidden = draft_hidden(FastForward(model), rounds, keys, live)
    for n in range(len(rounds.anchors)):
        row, at = int(rounds.rows[n]), int(rounds.positions[n])
        seen = torch.arange(max(0, at - 8), at)
        one = model.context_keys(model.draft_context(taps[row, seen]), seen)
        expected = model.draft_hidden(
            rounds.anchors[n : n + 1],
            rounds.positions[n : n + 1],
            [key.unsqueeze(0) for key in one],
            torch.ones(1, len(seen), dtype=torch.bool),
        )
        torch.testing.assert_close(hidden[n : n + 1], expected, rtol=0, atol=1e-9)
    logits, _ = draft_logits(model, hidden, rounds.previous)
    head = model.mtp[-1].markov_head
    bias = head.embed.weight[rounds.previous] @ head.head.weight.t()
    torch.testing.assert_close(logits - model.draft_base_logits(hidden), bias)


def test_losses_by_hand() -> None:
    logits = torch.tensor([[[0.0, 0.0]], [[2.0, 2.0]]]).log_softmax(-1)
    target = torch.tensor([[[0.9, 0.1]], [[0.5, 0.5]]])
    confidence = torch.tensor([[0.0], [3.0]])
    losses, accepted = slot_losses(logits, confidence, target, torch.tensor([[0], [1]]))
    torch.testing.assert_close(accepted, torch.tensor([[0.6], [1.0]]))
    half = float(np.log(2.0))
    first = 0.1 * half + 0.9 * 0.8 + half
    second = 0.1 * half + float(np.log1p(np.exp(-3.0)))
    torch.testing.assert_close(losses, torch.tensor([[first], [second]]))
    apart, same = slot_losses(logits, confidence, target, torch.tensor([[0], [1]]), True)
    assert torch.equal(same, accepted)
    # Cross entropy to the target is log 2 in both rows: the draft is even.
    torch.testing.assert_close(apart, losses + 0.9 * (half - torch.tensor([[0.8], [0.0]])))
    pair = torch.tensor([[1.0, 5.0], [2.0, 7.0]])
    live = torch.tensor([[True, True], [True, False]])
    late = float(np.exp(-0.25))
    assert abs(float(draft_loss(pair, live)) - (3.0 + 5.0 * late) / (2.0 + late)) < 1e-6


def test_rows_without_an_answer_move_nothing() -> None:
    """Four rows of a long prompt have no live round; a mean over none made every weight NaN."""
    losses = torch.ones(2, 5, requires_grad=True)
    loss = draft_loss(losses, torch.zeros(2, 5, dtype=torch.bool))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert losses.grad is not None and not losses.grad.any()


def test_batches_take_turns_and_the_target_runs_once_for_each(make_model: MakeModel) -> None:
    stream = np.concatenate([np.r_[0, np.arange(30) % 17 + 3 + s] for s in range(40)])
    rows = Rows(stream.astype(np.uint16), 32, 0, 1)
    plan = DraftPlan(Plan(shape=(2, 32)), anchors=4, uses=3, held=2, divergence_until=0.5)
    assert [plan.batch_of(step) for step in range(8)] == [0, 1, 0, 1, 0, 1, 2, 3]
    trainer = DrafterTrainer(make_model(5, dtype=torch.float32), [rows, rows], plan, None)
    ids, first = trainer.rounds(0)
    again, second = trainer.rounds(2)
    assert torch.equal(ids, again)
    assert not torch.equal(first.positions, second.positions)
    seen = []
    observe = trainer.observe

    def counted(ids: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(ids)
        return observe(ids)

    trainer.observe = counted  # type: ignore[method-assign]
    trainer.progress.begin_leg(8 * 64)
    losses = [trainer.train_step()["loss"] for _ in range(8)]
    assert len(seen) == 4
    # The divergence of a nearly even draft over a hundred tokens is far above its total variation.
    assert min(losses[:4]) > max(losses[4:])


@pytest.mark.parametrize("quantised_from", [2.0, 0.5])
def test_short_run(make_model: MakeModel, tmp_path: Path, quantised_from: float) -> None:
    """Acceptance rises, only the drafter moves, and a resumed run continues exactly."""
    stream = np.concatenate([np.r_[0, np.arange(30) % 17 + 3 + s] for s in range(40)])
    plan = DraftPlan(Plan(shape=(2, 32), warmup_steps=2, quantised_from=quantised_from), anchors=12)
    rows = Rows(stream.astype(np.uint16), 32, 0, 1)

    def fresh() -> DrafterTrainer:
        model = make_model(5, dtype=torch.float32, **STORED_SIZES)
        start_from_target(model)
        trainer = DrafterTrainer(model, [rows, rows], plan, None)
        trainer.progress.begin_leg(16 * 64)
        return trainer

    whole = fresh()
    before = {n: p.clone() for n, p in whole.model.named_parameters()}
    figures = [whole.train_step() for _ in range(16)]
    assert whole.progress.share() == 1.0
    assert figures[-1]["loss"] < figures[0]["loss"] - 0.1
    changed = {n for n, p in whole.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all(name.startswith("mtp.") for name in changed)
    first = fresh()
    for _ in range(12):
        first.train_step()
    first.save(tmp_path / "state.pt", {})
    second = fresh()
    second.load(torch.load(tmp_path / "state.pt", weights_only=True))
    rest = [second.train_step()["loss"] for _ in range(12, 16)]
    assert rest == [row["loss"] for row in figures[12:]]


def test_run_logs_and_exports(
    make_raw: Callable[..., dict[str, Any]], make_model: MakeModel, tmp_path: Path
) -> None:
    stream = np.concatenate([np.r_[0, np.arange(30) % 17 + 3 + s] for s in range(40)])
    rows = Rows(stream.astype(np.uint16), 32, 0, 1)
    plan = DraftPlan(Plan(shape=(2, 32)), anchors=4)
    trainer = DrafterTrainer(make_model(5, dtype=torch.float32), [rows], plan, None)
    trainer.progress.begin_leg(2 * 64)
    save = (tmp_path / "drafter.pt", tmp_path / "export", make_raw())
    run(trainer, 60.0, tmp_path, save)
    assert len((tmp_path / "drafter.csv").read_text().splitlines()) == 3
    assert (tmp_path / "export" / "model.safetensors").is_file()


def test_a_leg_begins_on_the_committed_weights() -> None:
    """Target and drafter as they are; temperatures of a head that will change are left out."""
    committed = TOKENIZER.parent
    raw, model = start_model(Namespace(start="weights", export=committed))
    stored = load_model(committed).state_dict()
    started = model.state_dict()
    assert stored.keys() == started.keys()
    assert all(torch.equal(started[name], value.float()) for name, value in stored.items())
    assert "dspark_confidence_temperatures" not in raw["text_config"]


def test_a_leg_on_weights_counts_on_from_the_log(tmp_path: Path) -> None:
    for row in ({"step": 5, "tokens": 70, "seconds": 1.5}, {"step": 9, "tokens": 90, "seconds": 4}):
        Log(tmp_path / "log.csv").write(row)
    progress = progress_of(last_row(tmp_path / "log.csv"))
    assert progress == Progress(9, 90, 4.0)
    progress.enter_leg(10, fresh=False)
    assert (progress.leg_step, progress.leg_start, progress.share()) == (9, 90, 0.0)
