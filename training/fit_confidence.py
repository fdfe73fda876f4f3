"""Fits the confidence head to a finished drafter: `python -m training.fit_confidence`.

Owns the last fit of one row of weights. The drafter trains on rows that it sees several times and
moves while its confidence head follows, so the head ends above what held-out text accepts. Here
drafter and target stand still: the head's weights are fitted, by logistic regression, to acceptance
in training rows that no step has drafted in, at the temperature that deployments sample with. Data
flow: checkpoint + training rows -> (hidden, Markov embedding), acceptance -> weights -> checkpoint.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from decodegrid.graphs.checkpoint import load_model
from decodegrid.graphs.drafter import DraftModel
from training.batches import Rows
from training.draft_forward import context_of, draft_hidden, draft_logits, pick_rounds
from training.fast_forward import FastForward
from training.run_log import BUILD

SEED = 20261
_PULL = 1e-4
"""Weight of the squared distance to the trained weights."""


@torch.no_grad()
def observe(
    model: DraftModel, rows: Rows, place: tuple[int, int], temperature: float, anchors: int
) -> tuple[Tensor, Tensor]:
    """Head inputs (N, D + rank) and acceptance (N,) of live slots; place: first row, count."""
    fast, drafter = FastForward(model), FastForward(model)
    generator = torch.Generator().manual_seed(SEED)
    block = model.config.dspark_block_size
    inputs, accepted = [], []
    for index in range(place[0], place[0] + place[1]):
        ids, targets = rows.batch(index, 1)
        output = fast(ids, dense=False)
        answers = rows.answer_targets(index, 1)
        rounds = pick_rounds(ids, targets, answers, block, anchors, generator)
        keys, seen = context_of(model, output.taps, rounds)
        hidden = draft_hidden(drafter, rounds, keys, seen)
        drafted, _ = draft_logits(model, hidden, rounds.previous)
        slots = rounds.positions[:, None] + torch.arange(block)
        wanted = model.head_logits(output.hidden)[rounds.rows[:, None], slots]
        both = [(logits / temperature).softmax(-1) for logits in (drafted, wanted)]
        accepted.append(torch.minimum(*both).sum(-1)[rounds.live])
        embedded, _ = model.markov(rounds.previous)
        inputs.append(torch.cat((hidden, embedded), -1)[rounds.live])
    return torch.cat(inputs), torch.cat(accepted)


def fit(start: Tensor, inputs: Tensor, accepted: Tensor) -> Tensor:
    """Weights (1, D + rank) with the least cross entropy to `accepted`, held to `start`."""
    weight = start.clone().requires_grad_(True)
    # Units in which every channel has the same size; the fit would crawl along the large ones.
    size = inputs.square().mean(0).sqrt().clamp(min=1e-6)
    scaled = (start * size).detach().requires_grad_(True)
    optimizer = torch.optim.LBFGS([scaled], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = ((inputs / size) @ scaled.t()).squeeze(-1)
        value = F.binary_cross_entropy_with_logits(logits, accepted)
        value = value + _PULL * (scaled - weight.detach() * size).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return (scaled / size).detach()


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Fit the confidence head.")
    parser.add_argument("--model", type=Path, default=BUILD / "export")
    parser.add_argument("--first-row", type=int, default=6000, help="beyond what was trained on")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--anchors", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(arguments.model)
    stream, marks = np.load(BUILD / "train.npy"), np.load(BUILD / "train_answers.npy")
    rows = Rows(stream, 512, model.config.bos_token_id, SEED, marks)
    place = (arguments.first_row, arguments.rows)
    inputs, accepted = observe(model, rows, place, arguments.temperature, arguments.anchors)
    name = f"mtp.{len(model.mtp) - 1}.confidence_head.proj.weight"
    start = model.draft_blocks[-1].confidence_head.proj.weight.detach().float()
    weight = fit(start, inputs.float(), accepted.float())
    path = arguments.model / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = weight.to(tensors[name].dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    for label, head in (("before", start), ("after", weight)):
        mean = float((inputs.float() @ head.t()).sigmoid().mean())
        print(f"{label}: mean confidence {mean:.4f}, accepted {float(accepted.mean()):.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
