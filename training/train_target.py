"""Trains the embedded model's target: `python -m training.train_target --tokens 2000000`.

Owns the losses, the router-bias update, the log and the saved states. Data flow:
build/training/train.npy -> rows -> loss -> update; state to build/training/target.pt, weights to
build/training/export. What a run does is a function of its plan (`schedule`), seed and step alone;
`--minutes` only ends the process, and `--start state` goes on with the leg.

In the part of a leg that is quantised, the forward pass sees the weights and the cache records that
a quantised checkpoint and a V4.1 cache would hold, and gradients go to the own weights as if they
did not. What is exported then are the rounded weights.
"""

import argparse
import dataclasses
import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from decodegrid.graphs.attention import IndexTrace
from decodegrid.graphs.checkpoint import load_model, save_model
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.engram_vocab import compressed_token_classes
from decodegrid.graphs.model import MoE
from training.batches import Rows
from training.fast_forward import Compiler, FastForward
from training.optimizer import PRODUCTS, Optimizer
from training.quantised import rounded_weights
from training.run_log import BUILD, LOGS, Log, compile_piece, last_row
from training.schedule import Plan, Progress, progress_of, rate_factor
from training.tiny_config import TOKENIZER, build_model, copy_tokenizer, tiny_config

SEED = 20260


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


def rows_of(
    stream: Rows, step: int, count: int, weights: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, targets and loss weights of the `count` rows that a step takes from one stream;
    `weights`: of a target that no assistant wrote, and of one in an answer."""
    first = step * count
    marks = stream.answer_targets(first, count)
    return *stream.batch(first, count), torch.where(marks, weights[1], weights[0])


class TargetTrainer:
    """One run: model, optimizer, data and progress."""

    def __init__(
        self,
        raw: dict[str, Any],
        classes: list[int],
        streams: dict[str, npt.NDArray[np.uint16]],
        plan: Plan,
        compiler: Compiler | None,
        answers: npt.NDArray[np.bool_] | None = None,
        copies: tuple[npt.NDArray[np.uint16], npt.NDArray[np.bool_]] | None = None,
    ) -> None:
        """`streams`: tokens of "train" and of any number of held-out domains; `answers`: the marks
        of "train", None: every token is an answer's; `copies`: tokens and marks of the text that
        copies, for the plan's `copy_rows`."""
        self.raw, self.plan = raw, plan
        bos = raw["bos_token_id"]
        lengths = {plan.shape[1], *(length for _, length in plan.long_rows)}
        self.train_rows = {
            n: Rows(streams["train"], n, bos, SEED, answers) for n in sorted(lengths)
        }
        self.copies: Rows | None = None
        if plan.copy_rows:
            if copies is None:
                raise ValueError(f"{plan.copy_rows} rows of each step copy, but no text is given")
            self.copies = Rows(copies[0], plan.shape[1], bos, SEED, copies[1])
        self.heldout_rows = {
            name: Rows(stream, plan.shape[1], bos, SEED)
            for name, stream in streams.items()
            if name != "train"
        }
        self.model = build_model(raw, classes, SEED)
        self.model.mtp.requires_grad_(False)
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.named = [(n, p) for n, p in named if n.rsplit(".", 1)[-1] not in ("bias", "bias_vl")]
        self.optimizer = Optimizer(self.named, plan.rates)
        self.fast = FastForward(self.model, compiler, plan.shape)
        self.progress = Progress()

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, targets and their weights of a step: short rows, or one long row."""
        plan = self.plan
        rows, length = plan.shape
        for every, longer in plan.long_rows:
            if step % every == every - 1:
                rows, length = 1, longer
        copying = plan.copy_rows if length == plan.shape[1] else 0
        prompt_weight = plan.prompt_weight
        parts = [rows_of(self.train_rows[length], step, rows - copying, (prompt_weight, 1.0))]
        if copying:
            assert self.copies is not None
            parts.append(rows_of(self.copies, step, copying, plan.copy_weights))
        ids, targets, weights = (torch.cat(part) for part in zip(*parts, strict=True))
        return ids, targets, weights

    @property
    def quantised(self) -> bool:
        """Whether this part of the leg rounds weights and records."""
        return self.progress.share() >= self.plan.quantised_from

    def stored(self) -> AbstractContextManager[None]:
        """Within, the weights are what would be stored now."""
        return rounded_weights(self.named) if self.quantised else nullcontext()

    def train_step(self) -> dict[str, float]:
        """One update; returns the figures of the log."""
        plan, progress = self.plan, self.progress
        begin, share = time.perf_counter(), progress.share()
        dense = share < plan.dense_until
        trace = not dense or progress.step % plan.index_every == 0
        gather = dense and trace and plan.spread_weight > 0
        ids, targets, weights = self.batch(progress.step)
        with self.stored():
            output = self.fast(
                ids, dense=dense, trace_indexer=trace, records=self.quantised, spread=gather
            )
            loss = self.fast.mean_loss(output, targets, weights)
            extra = index_loss(output.traces) if trace else torch.zeros(())
            spread = sum(self.fast.spreads, torch.zeros(()))
            (loss + extra + plan.spread_weight * spread).backward()
        factor = rate_factor(plan, progress.step - progress.leg_step, share)
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
            "spread": float(spread.detach()) if gather else float("nan"),
        }

    def heldout(self, rows: int) -> dict[str, float]:
        """Mean loss of the first `rows` rows of each held-out domain, in nats per token."""
        result = {}
        plan, share = self.plan, self.progress.share()
        batch = plan.shape[0]
        for name, stream in self.heldout_rows.items():
            losses = []
            for first in range(0, rows, batch):
                ids, targets = stream.batch(first, batch)
                # Gradients stay enabled: another mode would compile every piece again.
                with self.stored():
                    output = self.fast(ids, dense=share < plan.dense_until, records=self.quantised)
                    losses.append(float(self.fast.mean_loss(output, targets).detach()))
            result[name] = float(np.mean(losses))
        return result

    def save(self, path: Path) -> None:
        """Write weights, optimizer and progress."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": dataclasses.astuple(self.progress),
            "raw": self.raw,
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def export(self, directory: Path) -> None:
        """Write a bfloat16 checkpoint of the weights as they would be stored now."""
        with self.stored():
            save_model(self.model, directory, torch.bfloat16, self.raw)

    def load(self, path: Path) -> None:
        """Continue from `save`'s file."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(*state["progress"])

    def load_weights(self, directory: Path, progress: Progress) -> None:
        """Continue from exported weights: no optimizer state, so a new leg has to begin."""
        loaded = load_model(directory)
        self.model.load_state_dict(loaded.state_dict())
        self.progress = progress


def logged_figures(recent: list[dict[str, float]]) -> dict[str, float]:
    """Of the latest step; what has a mean over steps is the mean of those that have it."""
    means = {}
    for name in ("loss", "index_kl", "spread"):
        values = [row[name] for row in recent if not math.isnan(row[name])]
        means[name] = sum(values) / len(values) if values else math.nan
    return recent[-1] | means


def run(trainer: TargetTrainer, *, minutes: float, state: Path, export: Path, logs: Path) -> None:
    """Train until the leg or the time is over, logging and saving on the way."""
    plan, progress = trainer.plan, trainer.progress
    log, heldout_log = Log(logs / "target.csv"), Log(logs / "target_heldout.csv")
    began = saved = time.perf_counter()
    recent: list[dict[str, float]] = []
    while progress.share() < 1.0 and time.perf_counter() - began < 60.0 * minutes:
        recent.append(trainer.train_step())
        if progress.step % plan.log_every == 0 or progress.step <= 3:
            row: dict[str, float] = {"step": progress.step, "tokens": progress.tokens}
            row |= {"seconds": round(progress.seconds, 1)}
            row |= {name: round(value, 5) for name, value in logged_figures(recent).items()}
            recent.clear()
            log.write(row)
            print(row, flush=True)
        if progress.step % plan.heldout_every == 0:
            report_heldout(trainer, heldout_log)
        if time.perf_counter() - saved > plan.save_seconds:
            trainer.save(state)
            trainer.export(export)
            saved = time.perf_counter()
    report_heldout(trainer, heldout_log)
    trainer.save(state)
    trainer.export(export)


def report_heldout(trainer: TargetTrainer, log: Log) -> None:
    """Measure, log and print the held-out losses."""
    figures = trainer.heldout(4)
    progress = trainer.progress
    row: dict[str, float] = {"step": progress.step, "tokens": progress.tokens}
    row |= {name: round(value, 4) for name, value in figures.items()}
    log.write(row)
    print(row, flush=True)


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Train the embedded target model.")
    parser.add_argument("--tokens", type=int, help="length of a new leg, or of the saved one")
    parser.add_argument("--minutes", type=float, default=100.0, help="stop and save after these")
    parser.add_argument("--start", choices=("scratch", "state", "weights"), default="scratch")
    parser.add_argument("--new-leg", action="store_true", help="with --start state")
    parser.add_argument("--peak", type=float, default=Plan().peak, help="peak learning rate")
    parser.add_argument(
        "--quantised-from", type=float, default=Plan().quantised_from, help="share of the leg"
    )
    parser.add_argument("--copy-rows", type=int, default=0, help="of each step, from `copies`")
    parser.add_argument("--spread-weight", type=float, default=0.0, help="see `schedule.Plan`")
    parser.add_argument("--index-every", type=int, default=Plan().index_every)
    parser.add_argument("--dense-until", type=float, default=Plan().dense_until)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--products", choices=PRODUCTS, default="float32")
    parser.add_argument("--state", type=Path, default=BUILD / "target.pt")
    parser.add_argument("--export", type=Path, default=BUILD / "export")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_float32_matmul_precision(PRODUCTS[arguments.products])
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    raw = tiny_config(tokenizer)
    plan = Plan(
        peak=arguments.peak,
        quantised_from=arguments.quantised_from,
        copy_rows=arguments.copy_rows,
        spread_weight=arguments.spread_weight,
        index_every=arguments.index_every,
        dense_until=arguments.dense_until,
    )
    names = ("train", "heldout_stories", "heldout_templated")
    streams = {name: np.load(BUILD / f"{name}.npy") for name in names}
    classes = compressed_token_classes(tokenizer)
    answers = np.load(BUILD / "train_answers.npy")
    copies = None
    if plan.copy_rows:
        copies = np.load(BUILD / "copies.npy"), np.load(BUILD / "copies_answers.npy")
    trainer = TargetTrainer(raw, classes, streams, plan, compile_piece, answers, copies)
    begin(trainer, arguments)
    copy_tokenizer(arguments.export)
    run(
        trainer,
        minutes=arguments.minutes,
        state=arguments.state,
        export=arguments.export,
        logs=LOGS,
    )
    return 0


def begin(trainer: TargetTrainer, arguments: argparse.Namespace) -> None:
    """Set start values and leg; raises ValueError when a new leg has no length."""
    if arguments.start == "state":
        trainer.load(arguments.state)
    elif arguments.start == "weights":
        trainer.load_weights(arguments.export, progress_of(last_row(LOGS / "target.csv")))
    trainer.progress.enter_leg(arguments.tokens, fresh=arguments.new_leg)


if __name__ == "__main__":
    raise SystemExit(main())
