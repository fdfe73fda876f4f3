"""Fits the confidence head's temperatures for each way to verify: `python -m training.calibrate`.

Owns the fit and its report. Data flow: checkpoint + held-out rows -> draft rounds -> how often each
draft would be accepted under rejection sampling (exactly, 1 - total variation) and under coupled
noise (by drawing it) -> one temperature a slot -> the YAML lines of
`speculation.confidence_temperatures`, and the calibration error before and after.

The head was trained on acceptance at temperature 1. A deployment samples at another temperature,
and coupled noise accepts less often than rejection does; a divisor of the logit takes up both.

Source: Sequential Temperature Scaling (DSpark paper section 3.3), one slot after another; slots are
fitted on their conditional rates, which the survival is a product of.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
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


def fit(logits: Tensor, accepted: Tensor) -> float:
    """The temperature of GRID with the least cross entropy to the acceptance; both (N,)."""
    scaled = logits.unsqueeze(0) / GRID.unsqueeze(1)
    wanted = accepted.expand_as(scaled)
    loss = F.binary_cross_entropy_with_logits(scaled, wanted, reduction="none").mean(1)
    return float(GRID[loss.argmin()])


def calibration_error(predicted: Tensor, accepted: Tensor) -> float:
    """Expected calibration error over NUM_BINS bins of equal width; both (N,)."""
    bins = (predicted * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    error = 0.0
    for index in bins.unique():
        inside = bins == index
        gap = (predicted[inside].mean() - accepted[inside].mean()).abs()
        error += float(gap) * float(inside.float().mean())
    return error


def calibrate(observed: Observed) -> dict[str, dict[str, list[float]]]:
    """Mode -> temperatures, mean acceptance, and calibration errors before and after, by slot."""
    result: dict[str, dict[str, list[float]]] = {}
    for mode, accepted in observed.accepted.items():
        figures: dict[str, list[float]] = {
            name: [] for name in ("temperature", "accepted", "error_before", "error_after")
        }
        for slot in range(observed.logits.shape[1]):
            live = observed.live[:, slot]
            logits, rates = observed.logits[live, slot], accepted[live, slot]
            temperature = fit(logits, rates)
            figures["temperature"].append(round(temperature, 3))
            figures["accepted"].append(round(float(rates.mean()), 4))
            before = calibration_error(logits.sigmoid(), rates)
            after = calibration_error((logits / temperature).sigmoid(), rates)
            figures["error_before"].append(round(before, 4))
            figures["error_after"].append(round(after, 4))
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
    joined = Observed(
        torch.cat([part.logits for part in parts.values()]),
        torch.cat([part.live for part in parts.values()]),
        {mode: torch.cat([part.accepted[mode] for part in parts.values()]) for mode in MODES},
    )
    result = calibrate(joined)
    for name, part in parts.items():
        for mode in MODES:
            before, after = survival_error(part, mode, result[mode]["temperature"])
            result[mode] |= {f"{name}_survival_before": before, f"{name}_survival_after": after}
    text = json.dumps(result, indent=1)
    print(text)
    (BUILD / "calibration.json").write_text(text + "\n", encoding="utf-8")
    print("  confidence_temperatures:")
    for mode in MODES:
        print(f"    {mode}: {result[mode]['temperature']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
