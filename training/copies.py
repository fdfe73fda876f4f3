"""Builds text of which most answers are copied: `python -m training.copies --tokens 300000`.

Owns the choice of such chats. In the training text few of an answer's tokens are copies, so that a
drafter needs many steps before it learns to look one up; here most are. Data flow: templates ->
chats of the training side -> build/training/copies.npy and copies_answers.npy.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random

from training.conversation import Turn, assistant, user
from training.data import Document, is_heldout, write_stream
from training.render import render_full_pieces
from training.run_log import BUILD
from training.text_templates import draw_echo, draw_json_object, draw_list, draw_lookup
from training.vocabulary import Vocabulary

SEED = 20267
_GENERATORS = (draw_echo, draw_echo, draw_json_object, draw_json_object, draw_list, draw_lookup)


def copy_documents(vocabulary: Vocabulary, num_tokens: int) -> Iterator[Document]:
    """Chats of three pairs until they hold `num_tokens` tokens."""
    total, index = 0, 0
    while total < num_tokens:
        rng = Random(f"decodegrid:copies:{SEED}:{index}")
        index += 1
        pairs = [rng.choice(_GENERATORS)(rng) for _ in range(3)]
        if any(is_heldout(question) for question, _ in pairs):
            continue
        turns: list[Turn] = []
        for question, answer in pairs:
            turns += [user(question), assistant(answer)]
        rendered = render_full_pieces(turns)
        ids = vocabulary.encode(rendered)
        total += len(ids)
        marks = tuple(vocabulary.mark_answers(ids))
        yield Document("copies", tuple(ids), marks, len(rendered.text.encode()), False)


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Build text that copies.")
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--output", type=Path, default=BUILD)
    arguments = parser.parse_args()
    documents = list(copy_documents(Vocabulary.from_file(), arguments.tokens))
    print(write_stream(arguments.output, "copies", documents), "tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
