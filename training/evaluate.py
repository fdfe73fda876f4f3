"""Measures the embedded model on held-out text: `python -m training.evaluate`.

Owns the figures of the model card: loss per domain, drafter acceptance per slot, what the indexer
keeps of the attention, expert load. Reads a checkpoint as any user would, so the stored bfloat16
weights are what is measured. Data flow: checkpoint + build/training/heldout_*.npy -> `Report` ->
build/training/report.json and the checkpoint's README.md.
"""

import argparse
import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decodegrid.graphs.checkpoint import load_model
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model import ForwardOutput
from decodegrid.kernels.indexer import candidate_mask, top_k_mask
from training.batches import IGNORED, Rows
from training.draft_forward import Rounds, context_of, draft_hidden, draft_logits, pick_rounds
from training.fast_forward import FastForward
from training.model_card import write_card
from training.quantised import rounded_weights
from training.requests import heldout_requests, story_requests
from training.run_log import BUILD
from training.sample import generate
from training.vocabulary import Vocabulary

SEED = 20262
TEMPERATURES = (1.0, 0.6)
NUM_SAMPLES = (8, 3)
"""Stories at STORY_TEMPERATURE and templated requests at 0 that the card shows, the first ones."""
STORY_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class Domain:
    """Figures of one held-out domain; lists run over the draft slots."""

    tokens: int
    """Targets measured."""
    nats_per_token: float
    answer_nats_per_token: float
    """Over the tokens that an assistant wrote."""
    stored_nats_per_token: float
    """Over all, weights and cache records rounded to their quantised form."""
    bits_per_byte: float
    acceptance: dict[str, list[float]]
    """Temperature -> mean 1 - total variation between draft and target, in answers."""
    agreement: list[float]
    """Share of slots where both argmax tokens are equal: acceptance of a greedy run."""
    confidence: list[float]
    """Mean predicted acceptance; trained for temperature 1."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the model card states as measured."""

    row_tokens: int
    """Length of the rows that were measured."""
    domains: dict[str, Domain]
    index_recall: dict[str, float]
    """Indexer layer -> share of compressed attention mass inside its selection, over queries
    that see more entries than the selection holds, in a run that attends to all entries."""
    index_ceiling: dict[str, float]
    """The same for the selection that would hold the most."""
    expert_load: list[float]
    """Most loaded expert over the mean, per target layer."""


class Means:
    """Running sums by name, of vectors or scalars."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor, weight: Tensor) -> None:
        """Add value * weight, summed over the first axis."""
        total, count = (value * weight).sum(0), (torch.ones_like(value) * weight).sum(0)
        self.sums[name] = self.sums.get(name, torch.zeros_like(total)) + total
        self.counts[name] = self.counts.get(name, torch.zeros_like(count)) + count

    def list_of(self, name: str) -> list[float]:
        """Means, rounded to four digits."""
        means = self.sums[name] / self.counts[name].clamp(min=1)
        return [round(float(mean), 4) for mean in means.reshape(-1)]


def measure_drafts(
    fast: FastForward, output: ForwardOutput, logits: Tensor, rounds: Rounds, means: Means
) -> None:
    """Add acceptance, agreement and confidence of `rounds` to `means`."""
    model = fast.model
    assert isinstance(model, DraftModel)
    keys, live = context_of(model, output.taps, rounds)
    hidden = draft_hidden(fast, rounds, keys, live)
    drafted, confidence = draft_logits(model, hidden, rounds.previous)
    slots = rounds.positions[:, None] + torch.arange(drafted.shape[1])
    wanted = logits[rounds.rows[:, None], slots]
    weight = rounds.live.float()
    for temperature in TEMPERATURES:
        overlap = torch.minimum(
            (drafted / temperature).softmax(-1), (wanted / temperature).softmax(-1)
        ).sum(-1)
        means.add(f"T{temperature:g}", overlap, weight)
    means.add("agreement", (drafted.argmax(-1) == wanted.argmax(-1)).float(), weight)
    means.add("confidence", confidence.sigmoid(), weight)


def measure_recall(fast: FastForward, ids: Tensor, means: Means) -> None:
    """Add each indexer layer's kept share of the mass of a dense run to `means`."""
    config = fast.config
    candidates: Tensor | None = None
    for trace in fast(ids, dense=True, trace_indexer=True).traces:
        scores = trace.scores
        ratio = config.compress_ratios[trace.layer]
        lengths = (torch.arange(ids.shape[1]) + 1) // ratio
        if trace.layer == config.candidate_source_layer_id:
            candidates = candidate_mask(
                scores,
                lengths.expand(scores.shape[:-1]),
                config.candidate_block_size,
                config.candidate_topk_blocks,
            )
        elif candidates is not None:
            scores = scores.masked_fill(~candidates, float("-inf"))
        selected = top_k_mask(scores, config.index_topk)
        mass = torch.stack(trace.mass).sum(0)
        selective = lengths > config.index_topk
        kept = (mass * selected).sum(-1)[:, selective].sum()
        most = mass.topk(min(config.index_topk, mass.shape[-1]), -1).values.sum(-1)
        whole = mass.sum(-1)[:, selective].sum().reshape(1)
        means.add(str(trace.layer), kept / whole, whole)
        means.add(f"most {trace.layer}", most[:, selective].sum() / whole, whole)


def measure_losses(
    fast: FastForward, logits: Tensor, ids: Tensor, targets: Tensor, answers: Tensor, means: Means
) -> None:
    """Add the losses of `logits`, and those of the quantised form, to `means`."""
    live = (targets != IGNORED).float().flatten()

    def losses(given: Tensor) -> Tensor:
        flat, wanted = given.flatten(0, 1), targets.flatten()
        return F.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="none")

    means.add("loss", losses(logits), live)
    means.add("answer loss", losses(logits), live * answers.flatten())
    with rounded_weights(list(fast.model.named_parameters())):
        output = fast(ids, dense=False, records=True)
        means.add("stored loss", losses(fast.model.head_logits(output.hidden)), live)


@torch.no_grad()
def measure_domain(
    fast: FastForward, rows: Rows, num_rows: int, bytes_per_token: float, loads: dict[int, Tensor]
) -> tuple[Domain, Means]:
    """Figures of `num_rows` rows; adds expert loads to `loads`; the Means hold the recall."""
    model, means, recall = fast.model, Means(), Means()
    drafter = FastForward(model)
    generator = torch.Generator().manual_seed(SEED)
    for first in range(0, num_rows, 2):
        ids, targets = rows.batch(first, 2)
        answers = rows.answer_targets(first, 2)
        output = fast(ids, dense=False)
        for layer, load in enumerate(fast.loads):
            loads[layer] = loads[layer] + load
        logits = model.head_logits(output.hidden)
        measure_losses(fast, logits, ids, targets, answers, means)
        if isinstance(model, DraftModel) and len(model.mtp):
            block = model.config.dspark_block_size
            rounds = pick_rounds(ids, targets, answers, block, 64, generator)
            measure_drafts(drafter, output, logits, rounds, means)
        measure_recall(fast, ids, recall)
    (nats,) = means.list_of("loss")
    domain = Domain(
        tokens=int(means.counts["loss"]),
        nats_per_token=nats,
        answer_nats_per_token=means.list_of("answer loss")[0],
        stored_nats_per_token=means.list_of("stored loss")[0],
        bits_per_byte=round(nats / math.log(2.0) / bytes_per_token, 4),
        acceptance={f"{t:g}": means.list_of(f"T{t:g}") for t in TEMPERATURES},
        agreement=means.list_of("agreement"),
        confidence=means.list_of("confidence"),
    )
    return domain, recall


def measure(model: DraftModel, data: Path, length: int, num_rows: int) -> Report:
    """All figures: `num_rows` rows of `length` tokens per held-out domain under `data`."""
    meta = json.loads((data / "meta.json").read_text(encoding="utf-8"))
    fast = FastForward(model)
    loads: dict[int, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.int64))
    domains: dict[str, Domain] = {}
    recall: dict[str, list[float]] = defaultdict(list)
    ceiling: dict[str, list[float]] = defaultdict(list)
    for name in sorted(key for key in meta["domains"] if key.startswith("heldout_")):
        parts = meta["domains"][name].values()
        density = sum(part["bytes"] for part in parts) / sum(part["tokens"] for part in parts)
        marks = np.load(data / f"{name}_answers.npy")
        rows = Rows(np.load(data / f"{name}.npy"), length, meta["bos_token_id"], SEED, marks)
        domain, kept = measure_domain(fast, rows, num_rows, density, loads)
        domains[name.removeprefix("heldout_")] = domain
        for label in kept.sums:
            layer = label.removeprefix("most ")
            (recall if label == layer else ceiling)[layer] += kept.list_of(label)
    return Report(
        row_tokens=length,
        domains=domains,
        index_recall=_means_of(recall),
        index_ceiling=_means_of(ceiling),
        expert_load=[round(float(load.max() / load.float().mean()), 2) for load in loads.values()],
    )


def write_samples(model: DraftModel) -> list[dict[str, str]]:
    """Prompt and text of the card's samples: the first held-out prompts, seed 0."""
    vocabulary = Vocabulary.from_file()
    stories, others = NUM_SAMPLES
    requests = list(islice(story_requests(vocabulary, heldout=True), stories))
    requests += heldout_requests(vocabulary, others, SEED)
    samples = []
    for request in requests:
        temperature = STORY_TEMPERATURE if request.kind == "story" else 0.0
        new = generate(model, list(request.ids), 90, temperature, 0)
        kept = new[:-1] if new[-1] == vocabulary.ids.eos else new
        prompt = vocabulary.decode(list(request.ids)).split("User\uff5c>")[-1]
        samples.append(
            {
                "prompt": prompt.split("<\uff5cAssistant")[0],
                "temperature": f"{temperature:g}",
                "text": vocabulary.decode(kept),
            }
        )
    return samples


def _means_of(parts: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(float(np.mean(values)), 4) for name, values in parts.items()}


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Measure the embedded model.")
    parser.add_argument("--model", type=Path, default=BUILD / "export")
    parser.add_argument("--data", type=Path, default=BUILD)
    parser.add_argument("--rows", type=int, default=12, help="rows of each domain")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--card", action="store_true", help="write the model card too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(arguments.model)
    report = asdict(measure(model, arguments.data, arguments.length, arguments.rows))
    text = json.dumps(report, indent=1) + "\n"
    print(text, flush=True)
    (BUILD / "report.json").write_text(text, encoding="utf-8")
    if arguments.card:
        report["samples"] = write_samples(model)
        for name in ("answers", "calibration", "long_range"):
            path = BUILD / f"{name}.json"
            if path.exists():
                report[name] = json.loads(path.read_text(encoding="utf-8"))
        size = (arguments.model / "model.safetensors").stat().st_size
        write_card(arguments.model / "README.md", report, BUILD, model, size)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
