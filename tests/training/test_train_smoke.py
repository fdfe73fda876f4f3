"""A short target run: the loss falls, and a resumed run continues exactly."""

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from decodegrid.graphs.attention import IndexTrace
from decodegrid.graphs.checkpoint import load_model
from training import train_target
from training.batches import IGNORED, Rows
from training.optimizer import orthogonalise
from training.quantised import stored_values
from training.schedule import Plan, rate_factor
from training.train_target import TargetTrainer, begin, index_loss, logged_figures, run

PLAN = Plan(
    shape=(2, 32),
    long_rows=((4, 64), (8, 128)),
    warmup_steps=2,
    dense_until=0.7,
    index_every=2,
    save_seconds=1e9,
)
STORED_SIZES = {"moe_intermediate_size": 32, "head_dim": 32, "index_head_dim": 32}
STORED_SIZES |= {"engram_head_dim": 32}
"""Block formats want multiples of 32."""
STEPS = 20
TOKENS = 1408
"""Of STEPS steps: 64 each, and 128 in steps 7 and 15."""


def make_trainer(
    make_raw: Callable[..., dict[str, Any]],
    plan: Plan = PLAN,
    copies: tuple[npt.NDArray[np.uint16], npt.NDArray[np.bool_]] | None = None,
    **changes: int,
) -> TargetTrainer:
    """A trainer on a stream with a rule: each document counts upwards."""
    pieces = [np.r_[0, np.arange(20) % 17 + 3 + shift] for shift in range(60)]
    stream = np.concatenate(pieces).astype(np.uint16)
    streams = {name: stream for name in ("train", "heldout_counts")}
    marks = np.arange(len(stream)) % 3 > 0
    classes = [i % 64 for i in range(96)]
    return TargetTrainer(make_raw(**changes), classes, streams, plan, None, marks, copies)


def test_loss_falls_and_resume_is_exact(
    make_raw: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    whole = make_trainer(make_raw)
    whole.progress.begin_leg(TOKENS)
    losses = [whole.train_step()["loss"] for _ in range(STEPS)]
    assert losses[-1] < losses[0] - 0.3
    assert whole.progress.tokens == TOKENS and whole.progress.share() == 1.0
    first = make_trainer(make_raw)
    first.progress.begin_leg(TOKENS)
    for _ in range(15):
        first.train_step()
    first.save(tmp_path / "state.pt")
    second = make_trainer(make_raw)
    second.load(tmp_path / "state.pt")
    rest = [second.train_step()["loss"] for _ in range(15, STEPS)]
    assert rest == losses[15:]
    assert second.progress.tokens == TOKENS


def test_the_quantised_part_trains_and_exports_rounded_weights(
    make_raw: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    plan = dataclasses.replace(PLAN, quantised_from=0.5, long_rows=())
    trainer = make_trainer(make_raw, plan, **STORED_SIZES)
    trainer.progress.begin_leg(STEPS * 64)
    losses = [trainer.train_step()["loss"] for _ in range(10)]
    assert trainer.quantised
    losses += [trainer.train_step()["loss"] for _ in range(10)]
    assert losses[-1] < losses[9] < losses[0]
    trainer.export(tmp_path)
    exported = dict(load_model(tmp_path).named_parameters())
    name = "layers.2.ffn.experts.w1"
    own = dict(trainer.model.named_parameters())[name].detach()
    assert torch.equal(exported[name].float(), stored_values(name, own))
    assert not torch.equal(own, stored_values(name, own))


def test_prompt_targets_weigh_less(make_raw: Callable[..., dict[str, Any]]) -> None:
    trainer = make_trainer(make_raw)
    ids, _, weights = trainer.batch(0)
    marks = trainer.train_rows[32].answer_targets(0, 2)
    assert ids.shape == weights.shape == marks.shape
    assert 0 < int(marks.sum()) < marks.numel()
    torch.testing.assert_close(weights, torch.where(marks, 1.0, PLAN.prompt_weight))


def test_some_rows_of_a_step_copy_with_weights_of_their_own(
    make_raw: Callable[..., dict[str, Any]],
) -> None:
    plan = dataclasses.replace(PLAN, copy_rows=1)
    with pytest.raises(ValueError, match="1 rows of each step copy"):
        make_trainer(make_raw, plan)
    stream = np.r_[np.tile(np.r_[0, np.full(20, 50)], 9)].astype(np.uint16)
    trainer = make_trainer(make_raw, plan, copies=(stream, np.arange(len(stream)) % 2 > 0))
    ids, _, weights = trainer.batch(0)
    assert ids.shape == (2, 32)
    assert not (ids[0] == 50).all() and set(ids[1].tolist()) == {0, 50}
    assert set(weights[0].tolist()) == {1.0, np.float32(PLAN.prompt_weight)}
    assert set(weights[1].tolist()) == {np.float32(w) for w in plan.copy_weights}
    assert trainer.batch(3)[0].shape == (1, 64)


def test_a_loss_on_the_spread_gathers_the_mass(make_raw: Callable[..., dict[str, Any]]) -> None:
    """The same steps with and without it; it is logged for the steps that have it."""
    plan = dataclasses.replace(PLAN, dense_until=2.0, long_rows=(), shape=(2, 64))
    last = []
    for weight in (1e-9, 3.0):
        trainer = make_trainer(make_raw, dataclasses.replace(plan, spread_weight=weight))
        trainer.progress.begin_leg(30 * 128)
        figures = [trainer.train_step() for _ in range(30)]
        spreads = [row["spread"] for row in figures[::2]]
        assert all(math.isnan(row["spread"]) for row in figures[1::2])
        assert logged_figures(figures)["spread"] == pytest.approx(sum(spreads) / 15)
        assert math.isnan(logged_figures(figures[1:2])["spread"])
        last.append(spreads[-1])
    assert 0 < last[1] < 0.8 * last[0]


def test_every_so_many_steps_is_one_long_row(make_raw: Callable[..., dict[str, Any]]) -> None:
    trainer = make_trainer(make_raw)
    shapes = [tuple(trainer.batch(step)[0].shape) for step in range(8)]
    assert shapes == [(2, 32)] * 3 + [(1, 64)] + [(2, 32)] * 3 + [(1, 128)]


def run_leg(trainer: TargetTrainer, directory: Path, minutes: float = 60.0) -> None:
    """Run to the end of the leg with all files below `directory`."""
    run(
        trainer,
        minutes=minutes,
        state=directory / "state.pt",
        export=directory / "export",
        logs=directory,
    )


def test_run_logs_saves_and_exports(
    make_raw: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    trainer = make_trainer(make_raw)
    trainer.progress.begin_leg(3 * 64)
    run_leg(trainer, tmp_path)
    lines = (tmp_path / "target.csv").read_text().splitlines()
    assert lines[0].startswith("step,tokens,seconds,loss") and len(lines) == 4
    exported = load_model(tmp_path / "export")
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(
            dict(exported.named_parameters())[name], parameter.detach(), rtol=0.01, atol=1e-3
        )


def test_a_leg_goes_on_after_the_time_was_over(
    make_raw: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    trainer = make_trainer(make_raw)
    trainer.progress.begin_leg(2 * 64)
    run_leg(trainer, tmp_path, minutes=0.0)
    assert trainer.progress.step == 0
    again = make_trainer(make_raw)
    again.load(tmp_path / "state.pt")
    run_leg(again, tmp_path)
    assert again.progress.step == 2 and again.progress.share() == 1.0


def test_new_legs_start_from_state_or_weights(
    make_raw: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(make_raw)
    trainer.progress.begin_leg(2 * 64)
    run_leg(trainer, tmp_path)
    monkeypatch.setattr(train_target, "LOGS", tmp_path)
    for start in ("state", "weights"):
        again = make_trainer(make_raw)
        arguments = argparse.Namespace(
            start=start,
            state=tmp_path / "state.pt",
            export=tmp_path / "export",
            tokens=640,
            new_leg=start == "state",
        )
        begin(again, arguments)
        progress = again.progress
        assert (progress.leg_start, progress.leg_step, progress.leg_tokens) == (128, 2, 640)
        torch.testing.assert_close(
            again.model.embed.weight, trainer.model.embed.weight, rtol=0.01, atol=1e-3
        )
    with pytest.raises(ValueError, match="--tokens"):
        scratch = argparse.Namespace(start="scratch", tokens=None, new_leg=False)
        begin(make_trainer(make_raw), scratch)


def test_index_loss_is_zero_at_the_target_and_only_there() -> None:
    scores = torch.tensor([[[0.3, -0.2, float("-inf")], [float("-inf")] * 3]])
    share = torch.tensor([0.3, -0.2]).softmax(0)
    mass = torch.zeros(1, 2, 3)
    mass[0, 0, :2] = 2.5 * share
    halves = [mass * 0.4, mass * 0.6]
    torch.testing.assert_close(
        index_loss((IndexTrace(0, scores, halves),)), torch.zeros(()), rtol=0, atol=1e-6
    )
    mass[0, 0, :2] = torch.tensor([0.5, 0.5])
    expected = (0.5 * (0.5 / share).log()).sum()
    torch.testing.assert_close(
        index_loss((IndexTrace(0, scores, [mass]),)), expected, rtol=0, atol=1e-6
    )


def test_rate_factor() -> None:
    plan = Plan(warmup_steps=10, flat_until=0.5, final_factor=0.02)
    half = Plan(warmup_steps=10, flat_until=0.5, final_factor=0.02, peak=0.5)
    assert rate_factor(half, 4, 0.0) == 0.25
    assert rate_factor(plan, 4, 0.0) == 0.5
    assert rate_factor(plan, 100, 0.5) == 1.0
    assert abs(rate_factor(plan, 100, 0.75) - 0.51) < 1e-12
    assert abs(rate_factor(plan, 100, 1.0) - 0.02) < 1e-12


def test_rows_mark_answer_targets() -> None:
    stream = np.array([0, 5, 6, 0, 7, 8, 9, 0, 4, 3, 2, 6, 0], dtype=np.uint16)
    marks = stream > 5
    rows = Rows(stream, 4, 0, 3, marks)
    ids, targets = rows.batch(0, 2)
    assert torch.equal(rows.answer_targets(0, 2), targets > 5)
    assert bool(Rows(stream, 4, 0, 3).answer_targets(0, 2).all()) and ids.shape == (2, 4)
    with pytest.raises(ValueError, match="3 marks for a stream of 13"):
        Rows(stream, 4, 0, 3, marks[:3])


def test_rows_start_at_documents_and_leave_out_document_starts() -> None:
    stream = np.array([0, 5, 6, 0, 7, 8, 9, 0, 4, 3, 2, 6, 0], dtype=np.uint16)
    rows = Rows(stream, 4, 0, 3)
    assert rows.starts.tolist() == [0, 7]
    ids, targets = rows.batch(0, 2)
    by_first = {tuple(i): t for i, t in zip(ids.tolist(), targets.tolist(), strict=True)}
    assert by_first[(0, 5, 6, 0)] == [5, 6, IGNORED, 7]
    assert by_first[(0, 4, 3, 2)] == [4, 3, 2, 6]


def test_orthogonalise_flattens_the_spectrum() -> None:
    matrices = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
