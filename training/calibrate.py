"""Fits the confidence head's temperatures for each way to verify: `python -m training.calibrate`.

Owns the fit and its report. Data flow: checkpoint + held-out rows -> draft rounds -> how often each
draft would be accepted under rejection sampling (exactly, 1 - total variation) and under coupled
noise (by drawing it) -> one temperature a slot, written into the checkpoint's config.json, and the
survival's calibration error before and after.

The head was trained on acceptance at temperature 1. A deployment samples at another temperature,
and coupled noise accepts less often than rejection does; a divisor of the logit takes up both.

Source: Sequential Temperature Scaling (DSpark paper section 3.3): one slot after another, by the
calibration error of the survival up to it, here in the domain where it is larger.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from decodegrid.graphs.checkpoint import load_model
from decodegrid.graphs.drafter import DraftModel
from decodegrid.kernels.sampling import gumbel_noise
from training.batches import Rows
from training.draft_forward import context_of, draft_hidden, draft_logits, pick_rounds
from training.fast_forward import FastForward
from training.run_log import BUILD

SEED = 20263
GRID = torch.logspace(-1, 1, 201)
"""Temperatures that are tried."""
NUM_DRAWS = 64
"""Shared noises for each draft, from which the coupled acceptance is counted."""
NUM_BINS = 10
MODES = ("coupled", "rejection")


@dataclass(frozen=True, slots=True)
class Observed:
    """Confidence logits and true acceptance of drafts whose predecessors were right."""

    logits: Tensor
    """(N, block)."""
    live: Tensor
    """(N, block) bool."""
    accepted: dict[str, Tensor]
    """Mode -> (N, block) probability of acceptance."""


def coupled_acceptance(drafted: Tensor, wanted: Tensor, seed: int) -> Tensor:
    """How often both argmax agree under the same Gumbel noise, by NUM_DRAWS draws.

    drafted, wanted: (N, vocab) logits over the temperature. Returns (N,).
    """
    rows, vocab = drafted.shape
    equal = torch.zeros(rows)
    hot = torch.ones(rows)
    for draw in range(NUM_DRAWS):
        seeds = torch.full((rows,), seed + draw)
        noise = gumbel_noise(seeds, torch.arange(rows), hot, vocab)
        equal += ((drafted + noise).argmax(-1) == (wanted + noise).argmax(-1)).float()
    return equal / NUM_DRAWS


@torch.inference_mode()
def observe(
    model: DraftModel, rows: Rows, num_rows: int, temperature: float, anchors: int
) -> Observed:
    """Draft rounds at random anchors of `num_rows` rows, teacher-forced."""
    fast, drafter = FastForward(model), FastForward(model)
    generator = torch.Generator().manual_seed(SEED)
    block = model.config.dspark_block_size
    logits, live = [], []
    accepted: dict[str, list[Tensor]] = {mode: [] for mode in MODES}
    for index in range(num_rows):
        ids, targets = rows.batch(index, 1)
        output = fast(ids, dense=False)
        answers = rows.answer_targets(index, 1)
        rounds = pick_rounds(ids, targets, answers, block, anchors, generator)
        keys, seen = context_of(model, output.taps, rounds)
        hidden = draft_hidden(drafter, rounds, keys, seen)
        drafted, confidence = draft_logits(model, hidden, rounds.previous)
        slots = rounds.positions[:, None] + torch.arange(block)
        wanted = model.head_logits(output.hidden)[rounds.rows[:, None], slots] / temperature
        drafted = drafted / temperature
        logits.append(confidence)
        live.append(rounds.live)
        overlap = torch.minimum(drafted.softmax(-1), wanted.softmax(-1)).sum(-1)
        accepted["rejection"].append(overlap)
        flat = coupled_acceptance(drafted.flatten(0, 1), wanted.flatten(0, 1), 1000 * index)
        accepted["coupled"].append(flat.view(overlap.shape))
    return Observed(
        torch.cat(logits),
        torch.cat(live),
        {mode: torch.cat(parts) for mode, parts in accepted.items()},
    )


def fit(
    mode: str, parts: Sequence[Observed], earlier: Sequence[Tensor], slot: int
) -> tuple[float, list[Tensor]]:
    """The temperature of GRID with which the survival up to `slot` has the least error in the worst
    part; `earlier`: predicted survival up to the slot before, (N,) of each part. Returns the
    temperature and the survival up to this slot."""
    best, chosen = float("inf"), 1.0
    true = [part.accepted[mode][:, : slot + 1].prod(-1) for part in parts]
    for temperature in GRID.tolist():
        worst = 0.0
        for part, before, rates in zip(parts, earlier, true, strict=True):
            live = part.live[:, slot]
            predicted = before * (part.logits[:, slot] / temperature).sigmoid()
            worst = max(worst, calibration_error(predicted[live], rates[live]))
        if worst < best:
            best, chosen = worst, temperature
    after = [
        before * (part.logits[:, slot] / chosen).sigmoid()
        for part, before in zip(parts, earlier, strict=True)
    ]
    return chosen, after


def calibration_error(predicted: Tensor, accepted: Tensor) -> float:
    """Expected calibration error over NUM_BINS bins of equal width; both (N,)."""
    bins = (predicted * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    error = 0.0
    for index in bins.unique():
        inside = bins == index
        gap = (predicted[inside].mean() - accepted[inside].mean()).abs()
        error += float(gap) * float(inside.float().mean())
    return error


def calibrate(parts: Sequence[Observed]) -> dict[str, dict[str, list[float]]]:
    """Mode -> temperature and mean conditional acceptance, by slot; `parts` are text domains."""
    result: dict[str, dict[str, list[float]]] = {}
    for mode in MODES:
        survival = [torch.ones(len(part.logits)) for part in parts]
        figures: dict[str, list[float]] = {"temperature": [], "accepted": []}
        for slot in range(parts[0].logits.shape[1]):
            rates = torch.cat([part.accepted[mode][part.live[:, slot], slot] for part in parts])
            temperature, survival = fit(mode, parts, survival, slot)
            figures["temperature"].append(round(temperature, 3))
            figures["accepted"].append(round(float(rates.mean()), 4))
        result[mode] = figures
    return result


def survival_error(
    observed: Observed, mode: str, temperatures: list[float]
) -> tuple[list[float], list[float]]:
    """Calibration errors of the survival up to each slot, without and with `temperatures`.

    The predicted survival is the product of the confidences, the true one that of the acceptances.
    """
    true = observed.accepted[mode].cumprod(-1)
    raw = observed.logits.sigmoid().cumprod(-1)
    fitted = (observed.logits / torch.tensor(temperatures)).sigmoid().cumprod(-1)
    errors: tuple[list[float], list[float]] = ([], [])
    for slot in range(true.shape[1]):
        live = observed.live[:, slot]
        for found, predicted in zip(errors, (raw, fitted), strict=True):
            error = calibration_error(predicted[live, slot], true[live, slot])
            found.append(round(error, 4))
    return errors


def keep_temperatures(path: Path, found: dict[str, list[float]]) -> None:
    """Write the temperatures of each mode into a checkpoint's config.json."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["text_config"]["dspark_confidence_temperatures"] = found
    path.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Fit the confidence temperatures.")
    parser.add_argument("--model", type=Path, default=BUILD / "export")
    parser.add_argument("--data", type=Path, default=BUILD)
    parser.add_argument("--rows", type=int, default=24, help="rows of each domain")
    parser.add_argument("--anchors", type=int, default=40, help="draft rounds a row")
    parser.add_argument("--temperature", type=float, default=0.7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(arguments.model)
    parts = {}
    for name in ("heldout_stories", "heldout_templated"):
        stream = np.load(arguments.data / f"{name}.npy")
        marks = np.load(arguments.data / f"{name}_answers.npy")
        rows = Rows(stream, 512, model.config.bos_token_id, SEED, marks)
        parts[name] = observe(model, rows, arguments.rows, arguments.temperature, arguments.anchors)
    result = calibrate(list(parts.values()))
    for name, part in parts.items():
        for mode in MODES:
            before, after = survival_error(part, mode, result[mode]["temperature"])
            result[mode] |= {f"{name}_survival_before": before, f"{name}_survival_after": after}
    text = json.dumps(result, indent=1)
    print(text)
    (BUILD / "calibration.json").write_text(text + "\n", encoding="utf-8")
    found = {mode: result[mode]["temperature"] for mode in MODES}
    keep_temperatures(arguments.model / "config.json", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
