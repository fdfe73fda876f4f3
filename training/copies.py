"""Builds text of which most answers are copied: `python -m training.copies --tokens 300000`.

Owns the choice of such documents. In the training text few of an answer's tokens are copies, so
that target and drafter need many steps before they learn to look one up; here most are. Four
kinds: short chats (`_draw_chat`), runs of tool calls on one preamble (`_draw_calls`), tables that
several questions look things up in (`_draw_table`), and names at the start of a text that its end
asks for (`_draw_planted`, one of its wordings being the one that `long_range` measures). Half of
the answers of calls and tables, and a third of those of planted names, stand further back than a
window of 64.
Data flow: templates and training-side stories -> documents of the training side ->
build/training/copies.npy and copies_answers.npy.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from training.conversation import Call, Conversation, Turn, assistant, user
from training.data import Document, is_heldout, write_stream
from training.long_range import filler_sentences
from training.render import render_conversation
from training.run_log import BUILD
from training.text_templates import (
    ASKS,
    Pair,
    draw_echo,
    draw_json_object,
    draw_list,
    draw_lookup,
    draw_pairs,
    write_pairs,
)
from training.tool_templates import TOOL_TEMPLATES
from training.values import ANIMALS, draw_name
from training.vocabulary import Vocabulary

SEED = 20267
SHARES = {"chats": 0.25, "calls": 0.25, "tables": 0.25, "planted": 0.25}
"""Kind of document -> share of the tokens."""


def draw_array(rng: Random) -> Pair:
    """A list that comes back as a JSON array, in its order or reversed."""
    while True:
        question, answer = draw_list(rng)
        if answer.startswith("["):
            return question, answer


_PAIRS: tuple[tuple[int, Callable[[Random], Pair]], ...] = (
    (9, draw_array),
    (6, draw_json_object),
    (3, draw_echo),
    (2, draw_lookup),
)
"""(weight, generator) of the pairs of a chat."""


def _draw_chat(rng: Random) -> Conversation | None:
    """One to four pairs; None where a question is on the held-out side."""
    chosen = rng.choices(_PAIRS, [weight for weight, _ in _PAIRS], k=rng.choice((1, 1, 2, 3, 4)))
    turns: list[Turn] = []
    for _, draw in chosen:
        question, answer = draw(rng)
        if is_heldout(question):
            return None
        turns += [user(question), assistant(answer)]
    return Conversation("chats", tuple(turns))


def _draw_calls(rng: Random) -> Conversation | None:
    """Four to eight requests for one tool or two, each called and answered; None where a request is
    on the held-out side."""
    offered = rng.sample(TOOL_TEMPLATES, rng.choice((1, 1, 2)))
    turns: list[Turn] = []
    for _ in range(rng.randint(4, 8)):
        template = rng.choice(offered)
        exchange = template.draw(rng)
        if is_heldout(exchange.request):
            return None
        arguments = json.dumps(exchange.arguments, ensure_ascii=False)
        turns += [
            user(exchange.request),
            Turn("assistant", "", (Call(template.tool.name, arguments),)),
            Turn("tool", json.dumps(exchange.result)),
            assistant(exchange.answer),
        ]
    return Conversation("calls", tuple(turns), tuple(template.tool for template in offered))


def _draw_table(rng: Random) -> Conversation | None:
    """A table of up to 20 pairs, and questions for several of them, a turn each; None where the
    first question is on the held-out side."""
    pairs = draw_pairs(rng, rng.randint(6, 20))
    keys = rng.sample(list(pairs), rng.randint(3, min(8, len(pairs))))
    asks = [rng.choice(ASKS).format(k=key) for key in keys]
    first = f"{write_pairs(rng, pairs)}{asks[0]}"
    if is_heldout(first):
        return None
    turns: list[Turn] = []
    for key, question in zip(keys, (first, *asks[1:]), strict=True):
        turns += [user(question), assistant(str(pairs[key]))]
    return Conversation("tables", tuple(turns))


_NAMED = (
    "\n\nThe {a} was a little {a} named {n}.",
    "\n\nThe {a} was a little {a} named {n}.",
    " The name of the {a} was {n}.",
    ' "My name is {n}," said the {a}.',
)
"""How a text comes back to an animal."""


def _draw_planted(fillers: list[str], rng: Random) -> Conversation | None:
    """One to five named animals, up to some 300 tokens of other sentences, and their names again,
    in other orders and now and then with a sentence between."""
    animals = rng.sample(ANIMALS, rng.choice((1, 2, 3, 4, 5)))
    names = {animal: draw_name(rng) for animal in animals}
    parts = [
        f"{'Once upon a time, there' if not place else ' There'} was a little {a} named {names[a]}."
        for place, a in enumerate(animals)
    ]
    parts += [f" {rng.choice(fillers)}" for _ in range(rng.choice((0, 2, 4, 8, 12, 16, 18)))]
    for _ in range(rng.choice((1, 2, 3))):
        rng.shuffle(animals)
        for animal in animals:
            parts.append(rng.choice(_NAMED).format(a=animal, n=names[animal]))
            if rng.random() < 0.2:
                parts.append(f" {rng.choice(fillers)}")
    question = f"Tell me a story about a {rng.choice(animals)}."
    return Conversation("planted", (user(question), assistant("".join(parts))))


def copy_documents(vocabulary: Vocabulary, num_tokens: int) -> Iterator[Document]:
    """Documents until they hold `num_tokens` tokens; the kind furthest below its share is next."""
    planted = partial(_draw_planted, filler_sentences(heldout=False))
    draws: dict[str, Callable[[Random], Conversation | None]]
    draws = {"chats": _draw_chat, "calls": _draw_calls, "tables": _draw_table, "planted": planted}
    counts = dict.fromkeys(SHARES, 0)
    index = 0
    while sum(counts.values()) < num_tokens:
        kind = min(SHARES, key=lambda name: counts[name] / SHARES[name])
        conversation = draws[kind](Random(f"decodegrid:copies:{SEED}:{index}"))
        index += 1
        if conversation is None:
            continue
        rendered = render_conversation(conversation)
        ids = vocabulary.encode(rendered)
        counts[kind] += len(ids)
        marks = tuple(vocabulary.mark_answers(ids))
        yield Document(kind, tuple(ids), marks, len(rendered.text.encode()), False)


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Build text that copies.")
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--output", type=Path, default=BUILD)
    arguments = parser.parse_args()
    documents = list(copy_documents(Vocabulary.from_file(), arguments.tokens))
    Random(f"decodegrid:copies:{SEED}").shuffle(documents)
    print(write_stream(arguments.output, "copies", documents), "tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
