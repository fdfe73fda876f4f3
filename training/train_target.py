"""Trains the embedded model's target: `python -m training.train_target --minutes 60 [--resume]`.

Owns the schedule, the losses, the router-bias update, the log and the saved states. Data flow:
build/training/train.npy -> rows -> loss -> update; state to build/training/target.pt, weights to
configs/tiny/. Everything is a pure function of seed and step, except that `--minutes` measures
progress by the training clock; `--steps` measures it by steps.
"""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from decodegrid.graphs.attention import IndexTrace
from decodegrid.graphs.checkpoint import save_model
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.engram_vocab import compressed_token_classes
from decodegrid.graphs.model import MoE
from training.batches import Rows
from training.fast_forward import Compiler, FastForward
from training.optimizer import Optimizer
from training.run_log import BUILD, LOGS, ROOT, Log, compile_piece
from training.tiny_config import TOKENIZER, build_model, tiny_config

SEED = 20260


@dataclass(frozen=True, slots=True)
class Plan:
    """What a target run does; lengths in tokens, times in seconds."""

    phases: tuple[tuple[float, int, int], ...] = ((0.0, 4, 512),)
    """(share of the run at which it starts, rows of a step, tokens of a row); held-out rows have
    the first phase's shape."""
    rates: tuple[float, float] = (4e-3, 3e-3)
    """Peak learning rates of Muon and AdamW."""
    warmup_steps: int = 20
    flat_until: float = 0.5
    """Share of the run before the linear decay."""
    final_factor: float = 0.02
    dense_until: float = 0.82
    """Share of the run in which every layer sees every compressed entry."""
    index_every: int = 4
    """Steps between updates of the indexer while dense; afterwards each step updates it."""
    max_norm: float = 1.0
    bias_steps: int = 100
    bias_rates: tuple[float, float] = (1e-2, 2e-3)
    """Router-bias speed in the first `bias_steps` steps and later."""
    log_every: int = 10
    heldout_every: int = 100
    save_seconds: float = 300.0


@dataclass(slots=True)
class Progress:
    """Where a run stands; saved and restored."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


def rate_factor(plan: Plan, step: int, share: float) -> float:
    """Learning rate over its peak at `step`, `share` of the run being done."""
    warm = min(1.0, (step + 1) / plan.warmup_steps)
    late = max(0.0, (share - plan.flat_until) / (1.0 - plan.flat_until))
    return warm * (1.0 - (1.0 - plan.final_factor) * min(late, 1.0))


def index_loss(traces: tuple[IndexTrace, ...]) -> Tensor:
    """Mean KL divergence from each indexer's softmax to the mass of the layers that used it."""
    total = torch.zeros(())
    for trace in traces:
        mass = torch.stack(trace.mass).sum(0)
        size = mass.sum(-1, keepdim=True)
        live = size.squeeze(-1) > 0
        target = mass / size.clamp(min=1e-20)
        seen = trace.scores > float("-inf")
        # A finite floor keeps rows without any visible entry free of NaN.
        log_share = trace.scores.masked_fill(~seen, -1e30).log_softmax(-1)
        entropy = torch.special.xlogy(target, target).sum(-1)
        cross = -(target * log_share.masked_fill(~seen, 0.0)).sum(-1)
        total = total + ((entropy + cross) * live).sum() / live.sum().clamp(min=1)
    return total


@torch.no_grad()
def balance_routers(model: DraftModel, loads: list[Tensor], rate: float) -> float:
    """Move each router bias towards equal load; returns the worst max / mean load."""
    worst = 0.0
    for block, load in zip(model.layers, loads, strict=True):
        share = load / load.float().mean()
        worst = max(worst, float(share.max()))
        moe = block.ffn
        assert isinstance(moe, MoE)
        moe.gate.bias.add_(torch.sign(1.0 - share), alpha=rate)
    return worst


class TargetTrainer:
    """One run: model, optimizer, data and progress."""

    def __init__(
        self,
        raw: dict[str, Any],
        classes: list[int],
        streams: dict[str, npt.NDArray[np.uint16]],
        plan: Plan,
        compiler: Compiler | None,
    ) -> None:
        """`streams`: tokens of "train" and of any number of held-out domains."""
        self.raw, self.plan = raw, plan
        bos = raw["bos_token_id"]
        self.train_rows = [Rows(streams["train"], phase[2], bos, SEED) for phase in plan.phases]
        self.heldout_rows = {
            name: Rows(stream, plan.phases[0][2], bos, SEED)
            for name, stream in streams.items()
            if name != "train"
        }
        self.model = build_model(raw, classes, SEED)
        self.model.mtp.requires_grad_(False)
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        named = [(n, p) for n, p in named if n.rsplit(".", 1)[-1] not in ("bias", "bias_vl")]
        self.optimizer = Optimizer(named, plan.rates)
        self.fast = FastForward(self.model, compiler, plan.phases[0][1:])
        self.progress = Progress()

    def train_step(self, share: float) -> dict[str, float]:
        """One update, `share` of the run being done; returns the figures of the log."""
        plan, progress = self.plan, self.progress
        begin = time.perf_counter()
        dense = share < plan.dense_until
        trace = not dense or progress.step % plan.index_every == 0
        phase = sum(share >= start for start, _, _ in plan.phases) - 1
        batch = plan.phases[phase][1]
        ids, targets = self.train_rows[phase].batch(progress.step * batch, batch)
        output = self.fast(ids, dense=dense, trace_indexer=trace)
        loss = self.fast.mean_loss(output, targets)
        extra = index_loss(output.traces) if trace else torch.zeros(())
        (loss + extra).backward()
        factor = rate_factor(plan, progress.step, share)
        norm = self.optimizer.step(factor, plan.max_norm)
        speed = plan.bias_rates[progress.step >= plan.bias_steps]
        worst = balance_routers(self.model, self.fast.loads, speed)
        progress.step += 1
        progress.tokens += ids.numel()
        progress.seconds += time.perf_counter() - begin
        return {
            "loss": float(loss.detach()),
            "index_kl": float(extra.detach()) if trace else float("nan"),
            "norm": norm,
            "load": worst,
            "factor": factor,
            "dense": float(dense),
        }

    def heldout(self, rows: int, share: float) -> dict[str, float]:
        """Mean loss of the first `rows` rows of each held-out domain, in nats per token."""
        result = {}
        plan = self.plan
        batch = plan.phases[0][1]
        for name, stream in self.heldout_rows.items():
            losses = []
            for first in range(0, rows, batch):
                ids, targets = stream.batch(first, batch)
                # Gradients stay enabled: another mode would compile every piece again.
                output = self.fast(ids, dense=share < plan.dense_until)
                losses.append(float(self.fast.mean_loss(output, targets).detach()))
            result[name] = float(np.mean(losses))
        return result

    def save(self, path: Path) -> None:
        """Write weights, optimizer and progress."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": (self.progress.step, self.progress.tokens, self.progress.seconds),
            "raw": self.raw,
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def load(self, path: Path) -> None:
        """Continue from `save`'s file."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        step, tokens, seconds = state["progress"]
        self.progress = Progress(step, tokens, seconds)


def run(
    trainer: TargetTrainer, *, minutes: float, steps: int, state: Path, export: Path, logs: Path
) -> None:
    """Train until the clock or the step count ends the run, logging and saving on the way."""
    plan, progress = trainer.plan, trainer.progress
    log, heldout_log = Log(logs / "target.csv"), Log(logs / "target_heldout.csv")
    saved = time.perf_counter()
    losses: list[float] = []
    while True:
        share = progress.step / steps if steps else progress.seconds / (60.0 * minutes)
        if share >= 1.0:
            break
        figures = trainer.train_step(share)
        losses.append(figures["loss"])
        if progress.step % plan.log_every == 0 or progress.step <= 3:
            row = {"step": progress.step, "tokens": progress.tokens}
            row |= {"seconds": round(progress.seconds, 1)}
            row |= {name: round(value, 5) for name, value in figures.items()}
            row["loss"] = round(float(np.mean(losses)), 5)
            losses.clear()
            log.write(row)
            print(row, flush=True)
        if progress.step % plan.heldout_every == 0:
            report_heldout(trainer, heldout_log, share)
        if time.perf_counter() - saved > plan.save_seconds:
            trainer.save(state)
            save_model(trainer.model, export, torch.bfloat16, trainer.raw)
            saved = time.perf_counter()
    report_heldout(trainer, heldout_log, 1.0)
    trainer.save(state)
    save_model(trainer.model, export, torch.bfloat16, trainer.raw)


def report_heldout(trainer: TargetTrainer, log: Log, share: float) -> None:
    """Measure, log and print the held-out losses."""
    figures = trainer.heldout(4, share)
    row = {"step": trainer.progress.step, "tokens": trainer.progress.tokens}
    row |= {name: round(value, 4) for name, value in figures.items()}
    log.write(row)
    print(row, flush=True)


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Train the embedded target model.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=0, help="instead of --minutes")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--state", type=Path, default=BUILD / "target.pt")
    parser.add_argument("--export", type=Path, default=ROOT / "configs" / "tiny")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    raw, plan = tiny_config(tokenizer), Plan()
    names = ("train", "heldout_stories", "heldout_templated")
    streams = {name: np.load(BUILD / f"{name}.npy") for name in names}
    classes = compressed_token_classes(tokenizer)
    trainer = TargetTrainer(raw, classes, streams, plan, compile_piece)
    if arguments.resume:
        trainer.load(arguments.state)
    run(
        trainer,
        minutes=arguments.minutes,
        steps=arguments.steps,
        state=arguments.state,
        export=arguments.export,
        logs=LOGS,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
