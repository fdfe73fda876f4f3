"""Trains the drafter of a finished target: `python -m training.train_drafter --minutes 15`.

Owns the drafter's schedule, start values, log and saved states. The target, the embedding and the
head stay as they are. Data flow: build/training/target.pt -> random anchors in training rows ->
losses -> update of `mtp.*`; state to build/training/drafter.pt, weights to configs/tiny/. With
`--resume` the drafter goes on, on whatever target.pt holds then: it may start before the target
is finished.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from decodegrid.graphs.checkpoint import save_model
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
from training.optimizer import Optimizer
from training.run_log import BUILD, LOGS, ROOT, Log, compile_piece
from training.tiny_config import TOKENIZER, build_model

SEED = 20261


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What a drafter run does."""

    batch: int = 4
    length: int = 512
    anchors: int = 128
    """Rounds in each row."""
    rates: tuple[float, float] = (4e-3, 3e-3)
    warmup_steps: int = 10
    flat_until: float = 0.4
    final_factor: float = 0.02
    max_norm: float = 1.0
    bias_rate: float = 2e-3
    log_every: int = 10
    save_seconds: float = 240.0


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
    projection = model.mtp[0].main_proj.weight
    projection.mul_(0.1)
    projection[:, -projection.shape[0] :] += torch.eye(projection.shape[0])
    model.mtp[-1].norm.weight.copy_(model.norm.weight)


class DrafterTrainer:
    """One run over a model whose target is finished."""

    def __init__(
        self, model: DraftModel, train: Rows, plan: DraftPlan, compiler: Compiler | None
    ) -> None:
        self.model, self.train, self.plan = model, train, plan
        model.requires_grad_(False)
        model.mtp.requires_grad_(True)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        named = [(n, p) for n, p in named if n.rsplit(".", 1)[-1] not in ("bias", "bias_vl")]
        self.optimizer = Optimizer(named, plan.rates)
        self.target = FastForward(model, compiler)
        self.drafter = FastForward(model, compiler)
        self.losses = slot_losses if compiler is None else compiler(slot_losses)
        self.step, self.tokens, self.seconds = 0, 0, 0.0

    @torch.no_grad()
    def observe(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Taps (B, S, taps * D) and next-token probabilities (B, S, vocab) of the target."""
        output = self.target(ids, dense=False)
        return output.taps, self.model.head_logits(output.hidden).softmax(-1)

    def slots(self, taps: Tensor, probs: Tensor, rounds: Rounds) -> tuple[Tensor, Tensor, Tensor]:
        """Losses (N, block), acceptance (N, block), and draft logits (N, block, vocab)."""
        keys, live = context_of(self.model, taps, rounds)
        hidden = draft_hidden(self.drafter, rounds, keys, live)
        logits, confidence = draft_logits(self.model, hidden, rounds.previous)
        slots = rounds.positions[:, None] + torch.arange(logits.shape[1])
        wanted = probs[rounds.rows[:, None], slots]
        losses, accepted = self.losses(logits, confidence, wanted, rounds.drafted)
        return losses, accepted, logits

    def train_step(self, share: float) -> dict[str, float]:
        """One update, `share` of the run being done; returns the figures of the log."""
        plan, begin = self.plan, time.perf_counter()
        ids, targets = self.train.batch(self.step * plan.batch, plan.batch)
        taps, probs = self.observe(ids)
        generator = torch.Generator().manual_seed(SEED + self.step)
        block = self.model.config.dspark_block_size
        rounds = pick_rounds(ids, targets, block, plan.anchors, generator)
        self.drafter.loads = []
        losses, accepted, _ = self.slots(taps, probs, rounds)
        loss = draft_loss(losses, rounds.live)
        loss.backward()
        late = max(0.0, (share - plan.flat_until) / (1.0 - plan.flat_until))
        factor = min(1.0, (self.step + 1) / plan.warmup_steps)
        factor *= 1.0 - (1.0 - plan.final_factor) * min(late, 1.0)
        norm = self.optimizer.step(factor, plan.max_norm)
        self._balance()
        self.step += 1
        self.tokens += ids.numel()
        self.seconds += time.perf_counter() - begin
        by_slot = (accepted * rounds.live).sum(0) / rounds.live.sum(0)
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
            "progress": (self.step, self.tokens, self.seconds),
            "raw": raw,
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `save`'s state; the target keeps the values it has."""
        drafter = {n: v for n, v in state["model"].items() if n.startswith("mtp.")}
        self.model.load_state_dict({**self.model.state_dict(), **drafter})
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.seconds = state["progress"]


def run(
    trainer: DrafterTrainer, minutes: float, steps: int, logs: Path, save: tuple[Path, Path, Any]
) -> None:
    """Train until the clock or the step count ends the run; `save`: state file, export, config."""
    state, export, raw = save
    log, saved = Log(logs / "drafter.csv"), time.perf_counter()
    recent: list[dict[str, float]] = []
    while True:
        share = trainer.step / steps if steps else trainer.seconds / (60.0 * minutes)
        if share < 1.0:
            recent.append(trainer.train_step(share))
        if recent and (trainer.step % trainer.plan.log_every == 0 or trainer.step <= 2):
            means = {k: float(np.mean([row[k] for row in recent])) for k in recent[0]}
            row = {"step": trainer.step, "tokens": trainer.tokens}
            row |= {"seconds": round(trainer.seconds, 1)}
            row |= {name: round(value, 5) for name, value in means.items()}
            recent.clear()
            log.write(row)
            print(row, flush=True)
        if share >= 1.0 or time.perf_counter() - saved > trainer.plan.save_seconds:
            trainer.save(state, raw)
            save_model(trainer.model, export, torch.bfloat16, raw)
            saved = time.perf_counter()
        if share >= 1.0:
            return


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Train the embedded model's drafter.")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--steps", type=int, default=0, help="instead of --minutes")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--target", type=Path, default=BUILD / "target.pt")
    parser.add_argument("--state", type=Path, default=BUILD / "drafter.pt")
    parser.add_argument("--export", type=Path, default=ROOT / "configs" / "tiny")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    state = torch.load(arguments.target, weights_only=True)
    raw, plan = state["raw"], DraftPlan()
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    model = build_model(raw, compressed_token_classes(tokenizer), SEED)
    model.load_state_dict(state["model"])
    train = Rows(np.load(BUILD / "train.npy"), plan.length, raw["bos_token_id"], SEED)
    start_from_target(model)
    trainer = DrafterTrainer(model, train, plan, compile_piece)
    if arguments.resume:
        trainer.load(torch.load(arguments.state, weights_only=True))
    save = (arguments.state, arguments.export, raw)
    run(trainer, arguments.minutes, arguments.steps, LOGS, save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
