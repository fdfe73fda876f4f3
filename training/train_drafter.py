"""Trains the drafter of a finished target: `python -m training.train_drafter --tokens 1000000`.

Owns the drafter's schedule, start values, log and saved states. The target, the embedding and the
head stay as they are. Data flow: build/training/target.pt -> random anchors in the answers of
training rows, and of text that the target wrote (`write_text`) -> losses -> update of `mtp.*`;
state to build/training/drafter.pt, weights to build/training/export. Legs are as the target's
(`schedule`); a drafter may go on, on whatever target.pt holds then.

With `--quantised-from` the target is what a quantised checkpoint and a V4.1 cache make of it for
the whole run, and the drafter is rounded too from that share of the leg on.
"""

import argparse
import dataclasses
import json
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from decodegrid.graphs.checkpoint import load_model, save_model
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.engram_vocab import compressed_token_classes
from decodegrid.graphs.model import Block, MoE
from training.batches import Rows
from training.draft_forward import (
    Rounds,
    context_of,
    draft_hidden,
    draft_logits,
    draft_loss,
    pick_rounds,
    slot_losses,
)
from training.fast_forward import Compiler, FastForward
from training.optimizer import PRODUCTS, Optimizer
from training.quantised import round_in_place, rounded_weights
from training.run_log import BUILD, LOGS, Log, compile_piece, last_row
from training.schedule import Plan, Progress, progress_of, rate_factor
from training.tiny_config import TOKENIZER, build_model, copy_tokenizer

SEED = 20261


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What a drafter run does beside the schedule."""

    schedule: Plan = field(default_factory=lambda: Plan(warmup_steps=10, flat_until=0.4))
    """Of its fields those of rows, rates, legs and rounding count."""
    anchors: int = 128
    """Rounds in each row."""
    uses: int = 4
    """Steps that draft in the same rows, from other anchors: the target's forward is half of a
    step that needs it."""
    held: int = 16
    """Batches of rows that take turns until all are used up."""
    divergence_until: float = 0.0
    """Share of the leg in which the loss has the divergence instead of the total variation."""
    bias_rate: float = 2e-3

    def batch_of(self, step: int) -> int:
        """Number of the batch of rows that a step drafts in."""
        group, place = divmod(step, self.held * self.uses)
        return group * self.held + place % self.held


@torch.no_grad()
def start_from_target(model: DraftModel) -> None:
    """Give the drafter's layers the values of the target's last ones, where shapes match.

    Of a wider expert stack the first experts are taken; the tap projection starts as the last tap.
    """
    count = len(model.mtp)
    for block, source in zip(model.mtp, model.layers[-count:], strict=True):
        values = dict(source.named_parameters())
        for name, parameter in block.named_parameters():
            value = values.get(name)
            if value is None or value.dim() != parameter.dim():
                continue
            if value.shape[1:] == parameter.shape[1:] and len(value) >= len(parameter):
                parameter.copy_(value[: len(parameter)])
    projection = model.mtp[0].get_parameter("main_proj.weight")
    projection.mul_(0.1)
    projection[:, -projection.shape[0] :] += torch.eye(projection.shape[0])
    model.mtp[-1].get_parameter("norm.weight").copy_(model.norm.weight)


class DrafterTrainer:
    """One run over a model whose target is finished; steps take turns at the sources of rows."""

    def __init__(
        self, model: DraftModel, sources: list[Rows], plan: DraftPlan, compiler: Compiler | None
    ) -> None:
        self.model, self.sources, self.plan = model, sources, plan
        model.requires_grad_(False)
        model.mtp.requires_grad_(True)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.named = [(n, p) for n, p in named if n.rsplit(".", 1)[-1] not in ("bias", "bias_vl")]
        self.optimizer = Optimizer(self.named, plan.schedule.rates)
        self.target = FastForward(model, compiler)
        self.drafter = FastForward(model, compiler)
        self.losses = slot_losses if compiler is None else compiler(slot_losses)
        self.quantised_target = plan.schedule.quantised_from <= 1.0
        if self.quantised_target:
            round_in_place(model.layers)
        self.progress = Progress()
        self._observed: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def quantised(self) -> bool:
        """Whether this part of the leg rounds the drafter too."""
        return self.progress.share() >= self.plan.schedule.quantised_from

    @torch.no_grad()
    def observe(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Taps (B, S, taps * D) and next-token probabilities (B, S, vocab) of the target."""
        output = self.target(ids, dense=False, records=self.quantised_target)
        return output.taps, self.model.head_logits(output.hidden).softmax(-1)

    def observe_once(self, step: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As `observe`, kept while steps of the same group draft in the same rows."""
        batch = self.plan.batch_of(step)
        if batch not in self._observed:
            if batch % self.plan.held == 0:
                self._observed.clear()
            self._observed[batch] = self.observe(ids)
        return self._observed[batch]

    def slots(self, taps: Tensor, probs: Tensor, rounds: Rounds) -> tuple[Tensor, Tensor, Tensor]:
        """Losses (N, block), acceptance (N, block), and draft logits (N, block, vocab)."""
        keys, live = context_of(self.model, taps, rounds, records=self.quantised)
        hidden = draft_hidden(self.drafter, rounds, keys, live, records=self.quantised)
        logits, confidence = draft_logits(self.model, hidden, rounds.previous)
        slots = rounds.positions[:, None] + torch.arange(logits.shape[1])
        wanted = probs[rounds.rows[:, None], slots]
        divergence = self.progress.share() < self.plan.divergence_until
        losses, accepted = self.losses(logits, confidence, wanted, rounds.drafted, divergence)
        return losses, accepted, logits

    def rounds(self, step: int) -> tuple[Tensor, Rounds]:
        """Ids of a step's rows and the draft rounds in them."""
        count = self.plan.schedule.shape[0]
        batch = self.plan.batch_of(step)
        rows = self.sources[batch % len(self.sources)]
        first = batch // len(self.sources) * count
        ids, targets = rows.batch(first, count)
        answers = rows.answer_targets(first, count)
        generator = torch.Generator().manual_seed(SEED + step)
        block = self.model.config.dspark_block_size
        return ids, pick_rounds(ids, targets, answers, block, self.plan.anchors, generator)

    def train_step(self) -> dict[str, float]:
        """One update; returns the figures of the log."""
        schedule, progress = self.plan.schedule, self.progress
        begin, share = time.perf_counter(), progress.share()
        ids, rounds = self.rounds(progress.step)
        taps, probs = self.observe_once(progress.step, ids)
        self.drafter.loads = []
        with rounded_weights(self.named) if self.quantised else nullcontext():
            losses, accepted, _ = self.slots(taps, probs, rounds)
            loss = draft_loss(losses, rounds.live)
            loss.backward()
        factor = rate_factor(schedule, progress.step - progress.leg_step, share)
        norm = self.optimizer.step(factor, schedule.max_norm)
        self._balance()
        progress.step += 1
        progress.tokens += ids.numel()
        progress.seconds += time.perf_counter() - begin
        by_slot = (accepted * rounds.live).sum(0) / rounds.live.sum(0).clamp(min=1)
        figures = {"loss": float(loss.detach()), "norm": norm, "factor": factor}
        return figures | {f"accept{i + 1}": float(rate) for i, rate in enumerate(by_slot)}

    @torch.no_grad()
    def _balance(self) -> None:
        for block, load in zip(self.model.mtp, self.drafter.loads, strict=True):
            assert isinstance(block, Block) and isinstance(block.ffn, MoE)
            share = load / load.float().mean()
            block.ffn.gate.bias.add_(torch.sign(1.0 - share), alpha=self.plan.bias_rate)

    def save(self, path: Path, raw: dict[str, Any]) -> None:
        """Write weights, optimizer and progress."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": dataclasses.astuple(self.progress),
            "raw": raw,
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def export(self, directory: Path, raw: dict[str, Any]) -> None:
        """Write a bfloat16 checkpoint of target and drafter as they would be stored now."""
        with rounded_weights(self.named) if self.quantised else nullcontext():
            save_model(self.model, directory, torch.bfloat16, raw)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `save`'s state; the target keeps the values it has."""
        drafter = {n: v for n, v in state["model"].items() if n.startswith("mtp.")}
        self.model.load_state_dict({**self.model.state_dict(), **drafter})
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(*state["progress"])


def run(
    trainer: DrafterTrainer, minutes: float, logs: Path, save: tuple[Path, Path, dict[str, Any]]
) -> None:
    """Train until the leg or the time is over; `save`: state file, export, config."""
    state, export, raw = save
    schedule, progress = trainer.plan.schedule, trainer.progress
    log, began = Log(logs / "drafter.csv"), time.perf_counter()
    saved = began
    recent: list[dict[str, float]] = []
    while progress.share() < 1.0 and time.perf_counter() - began < 60.0 * minutes:
        recent.append(trainer.train_step())
        if progress.step % schedule.log_every == 0 or progress.step <= 2:
            means = {k: float(np.mean([row[k] for row in recent])) for k in recent[0]}
            row: dict[str, float] = {"step": progress.step, "tokens": progress.tokens}
            row |= {"seconds": round(progress.seconds, 1)}
            row |= {name: round(value, 5) for name, value in means.items()}
            recent.clear()
            log.write(row)
            print(row, flush=True)
        if time.perf_counter() - saved > schedule.save_seconds:
            trainer.save(state, raw)
            trainer.export(export, raw)
            saved = time.perf_counter()
    trainer.save(state, raw)
    trainer.export(export, raw)


def read_sources(plan: Plan, bos: int) -> list[Rows]:
    """Rows of the training text and, where there are any, of the text that the target wrote and of
    chats that copy; all have the same share."""
    sources = []
    for name in ("train", "written", "copies"):
        if name == "train" or (BUILD / f"{name}.npy").exists():
            stream, marks = np.load(BUILD / f"{name}.npy"), np.load(BUILD / f"{name}_answers.npy")
            sources.append(Rows(stream, plan.shape[1], bos, SEED, marks))
    return sources


def start_model(arguments: argparse.Namespace) -> tuple[dict[str, Any], DraftModel]:
    """Config and model that a run begins with: target and drafter of the exported weights, or the
    trained target with a drafter that starts from its layers."""
    classes = compressed_token_classes(Tokenizer.from_file(str(TOKENIZER)))
    if arguments.start == "weights":
        raw = json.loads((arguments.export / "config.json").read_text(encoding="utf-8"))
        # They are of the confidence head as it was.
        raw["text_config"].pop("dspark_confidence_temperatures", None)
        model = build_model(raw, classes, SEED)
        model.load_state_dict(load_model(arguments.export).state_dict())
        return raw, model
    state = torch.load(arguments.target, weights_only=True)
    model = build_model(state["raw"], classes, SEED)
    model.load_state_dict(state["model"])
    start_from_target(model)
    return state["raw"], model


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Train the embedded model's drafter.")
    parser.add_argument("--tokens", type=int, help="length of a new leg, or of the saved one")
    parser.add_argument("--minutes", type=float, default=100.0, help="stop and save after these")
    parser.add_argument("--start", choices=("target", "state", "weights"), default="target")
    parser.add_argument("--new-leg", action="store_true", help="with --start state")
    parser.add_argument("--peak", type=float, default=1.0, help="peak learning rate")
    parser.add_argument(
        "--quantised-from", type=float, default=Plan().quantised_from, help="share of the leg"
    )
    parser.add_argument("--divergence-until", type=float, default=0.0, help="share of the leg")
    parser.add_argument("--uses", type=int, default=DraftPlan().uses, help="see `DraftPlan`")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--products", choices=PRODUCTS, default="float32")
    parser.add_argument("--target", type=Path, default=BUILD / "target.pt")
    parser.add_argument("--state", type=Path, default=BUILD / "drafter.pt")
    parser.add_argument("--export", type=Path, default=BUILD / "export")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_float32_matmul_precision(PRODUCTS[arguments.products])
    raw, model = start_model(arguments)
    plan = DraftPlan()
    schedule = dataclasses.replace(
        plan.schedule, peak=arguments.peak, quantised_from=arguments.quantised_from
    )
    sources = read_sources(schedule, raw["bos_token_id"])
    plan = dataclasses.replace(
        plan,
        schedule=schedule,
        divergence_until=arguments.divergence_until,
        uses=arguments.uses,
    )
    trainer = DrafterTrainer(model, sources, plan, compile_piece)
    if arguments.start == "state":
        trainer.load(torch.load(arguments.state, weights_only=True))
    elif arguments.start == "weights":
        trainer.progress = progress_of(last_row(LOGS / "drafter.csv"))
    trainer.progress.enter_leg(arguments.tokens, fresh=arguments.new_leg)
    copy_tokenizer(arguments.export)
    run(trainer, arguments.minutes, LOGS, (arguments.state, arguments.export, raw))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
