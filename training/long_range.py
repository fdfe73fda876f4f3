"""Measures whether the target reads beyond its window: `python -m training.long_range`.

Owns the planted names and the figure: a name that is rare in stories, or made up, stands once, many
tokens of other text follow, and the text then asks for the name. Its probability is compared with
that of the same text when compressed attention is masked off, which leaves the windows alone. Data
flow: held-out stories and names -> texts -> `FastForward` twice -> build/training/long_range.json.

Information also moves from window to window through the layers; it does so in both runs.
"""

import argparse
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from decodegrid.graphs.checkpoint import load_model
from decodegrid.graphs.drafter import DraftModel
from training.conversation import user
from training.data import is_heldout
from training.fast_forward import FastForward
from training.render import Rendered, render_prompt_pieces
from training.run_log import BUILD
from training.stories import read_stories
from training.values import ANIMALS, draw_name
from training.vocabulary import Vocabulary

SEED = 20266
_SENTENCE = re.compile(r"[^.!?]+[.!?]")
_NAME_LIKE = re.compile(r"(?<=[a-z,] )[A-Z]")


@dataclass(frozen=True, slots=True)
class Planted:
    """One text with a name to repeat."""

    ids: tuple[int, ...]
    """All tokens, the repeated name last."""
    name_tokens: int
    """How many of them the name has."""
    gap: int
    """Tokens between the end of the planted name and the start of the repeated one."""


@dataclass(frozen=True, slots=True)
class LongRange:
    """Figures over all texts; a probability is that of the whole name."""

    texts: int
    gap: float
    """Mean tokens between both places."""
    with_compressed: float
    """Mean probability of the name."""
    window_only: float
    """The same with compressed attention masked off."""
    ratio: float
    """Of both means."""
    median_ratio: float
    """Median over texts of the ratio."""


def filler_sentences(*, heldout: bool) -> list[str]:
    """Sentences of one side's stories without quotes and without a name."""
    sentences = []
    for story in read_stories():
        if is_heldout(story.prompt) != heldout:
            continue
        for match in _SENTENCE.finditer(story.text.replace("\n", " ")):
            sentence = match.group().strip()
            if '"' not in sentence and sentence[:1].isupper() and not _NAME_LIKE.search(sentence):
                sentences.append(sentence)
    return sentences


def encode_text(vocabulary: Vocabulary, text: str) -> list[int]:
    """Ids of plain text."""
    return vocabulary.encode(Rendered(text, ()))


def plant(vocabulary: Vocabulary, rng: Random, fillers: list[str], gap: int) -> Planted:
    """A chat about an animal with an invented name and at least `gap` tokens between."""
    animal, name = rng.choice(ANIMALS), draw_name(rng)
    prompt = render_prompt_pieces((user(f"Tell me a story about a {animal}."),), ())
    opening = f"Once upon a time, there was a little {animal} named"
    before = vocabulary.encode(prompt) + encode_text(vocabulary, opening)
    spelled = encode_text(vocabulary, f" {name}")
    between = encode_text(vocabulary, ".")
    while len(between) < gap - 12:
        between += encode_text(vocabulary, f" {rng.choice(fillers)}")
    between += encode_text(vocabulary, f"\n\nThe {animal} was a little {animal} named")
    return Planted((*before, *spelled, *between, *spelled), len(spelled), len(between))


def name_probability(fast: FastForward, text: Planted, *, windows_only: bool) -> float:
    """Probability of the repeated name's tokens, one after another."""
    window = fast.config.sliding_window
    length = -(-len(text.ids) // window) * window
    padded = torch.tensor(text.ids + (0,) * (length - len(text.ids)))
    output = fast(padded.unsqueeze(0), dense=False, windows_only=windows_only)
    first = len(text.ids) - text.name_tokens
    hidden = output.hidden[0, first - 1 : len(text.ids) - 1]
    wanted: Tensor = padded[first : len(text.ids)].unsqueeze(-1)
    return float(fast.model.head_logits(hidden).log_softmax(-1).gather(-1, wanted).sum().exp())


@torch.inference_mode()
def measure(model: DraftModel, num_texts: int, gap: int) -> LongRange:
    """Figures over `num_texts` texts."""
    vocabulary, rng = Vocabulary.from_file(), Random(f"decodegrid:long_range:{SEED}")
    fillers = filler_sentences(heldout=True)
    texts = [plant(vocabulary, rng, fillers, gap) for _ in range(num_texts)]
    fast = FastForward(model)
    found = torch.tensor(
        [
            [name_probability(fast, text, windows_only=only) for only in (False, True)]
            for text in texts
        ]
    )
    means = found.mean(0)
    return LongRange(
        texts=num_texts,
        gap=sum(text.gap for text in texts) / num_texts,
        with_compressed=float(means[0]),
        window_only=float(means[1]),
        ratio=float(means[0] / means[1]),
        median_ratio=float((found[:, 0] / found[:, 1]).median()),
    )


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Measure the use of far context.")
    parser.add_argument("--model", type=Path, default=BUILD / "export")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--gap", type=int, default=300, help="least tokens between, about")
    parser.add_argument("--output", type=Path, default=BUILD / "long_range.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(load_model(arguments.model), arguments.texts, arguments.gap)
    text = json.dumps(asdict(figures), indent=1) + "\n"
    print(text, flush=True)
    arguments.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
