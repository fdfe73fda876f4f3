"""Builds the token files that training reads: `python -m training.data`.

Owns: the mix, the split by document, the packing. Does not own: rendering, the tokenizer, the
model. Data flow: stories (each once) and templated conversations until they hold their share of the
tokens -> documents -> train and held-out streams -> build/training/*.npy and meta.json.

Each document starts with the begin-of-sentence token (id 0). What follows the last token of a
document is the next document's first token, and a story that the length limit cut has no end-of-
sentence token: a loss must leave out the positions whose target is `bos`.
"""

import argparse
import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from training.conversation import Conversation
from training.render import render_conversation
from training.stories import CORPUS, hash_share, is_plain, read_stories, render_story
from training.templates import generate
from training.vocabulary import TOKENIZER_FILE, Vocabulary

OUTPUT = Path(__file__).parent.parent / "build" / "training"
HELDOUT_SHARE = 0.05
"""Share of the documents, by hash, that training never sees."""
TEMPLATED_SHARE = 0.50
"""Share of the tokens that are templated."""
TEMPLATE_SEED = 2026
_TEMPLATE_CHUNK = 500


@dataclass(frozen=True, slots=True)
class Document:
    """One document as token ids; `heldout` is the side of the split."""

    domain: str
    ids: tuple[int, ...]
    answers: tuple[bool, ...]
    num_bytes: int
    heldout: bool


def is_heldout(key: str) -> bool:
    """The side of the split for a document; depends on the key's text alone."""
    return hash_share(key, "heldout") < HELDOUT_SHARE


def build_story_documents(vocabulary: Vocabulary) -> Iterator[Document]:
    """Every story once. All answers to one prompt are on the same side of the split."""
    for story in read_stories():
        rendered = render_story(story)
        ids = vocabulary.encode(rendered)
        yield Document(
            "story_plain" if is_plain(story) else "story_chat",
            tuple(ids),
            tuple(vocabulary.mark_answers(ids)),
            len(rendered.text.encode()),
            is_heldout(story.prompt),
        )


def split_key(conversation: Conversation) -> str:
    """What decides the side of a templated conversation: its first user turn.

    Equal questions are on the same side, whatever chat they open.
    """
    return next(turn.content for turn in conversation.turns if turn.role == "user")


def build_templated_documents(vocabulary: Vocabulary, num_tokens: int) -> Iterator[Document]:
    """Templated conversations until they hold at least `num_tokens` tokens."""
    total, count = 0, 0
    while total < num_tokens:
        # The i-th conversation does not depend on how many are asked for.
        for conversation in generate(TEMPLATE_SEED, count + _TEMPLATE_CHUNK)[count:]:
            rendered = render_conversation(conversation)
            ids = vocabulary.encode(rendered)
            total += len(ids)
            yield Document(
                conversation.domain,
                tuple(ids),
                tuple(vocabulary.mark_answers(ids)),
                len(rendered.text.encode()),
                is_heldout(split_key(conversation)),
            )
            if total >= num_tokens:
                return
        count += _TEMPLATE_CHUNK


def write_stream(directory: Path, name: str, documents: list[Document]) -> int:
    """Write `<name>.npy` (uint16 token ids, documents end to end) and `<name>_answers.npy` (bool,
    same length).

    Returns the number of tokens.
    """
    ids = np.fromiter((t for d in documents for t in d.ids), dtype=np.uint16)
    answers = np.fromiter((a for d in documents for a in d.answers), dtype=np.bool_)
    np.save(directory / f"{name}.npy", ids)
    np.save(directory / f"{name}_answers.npy", answers)
    return len(ids)


def _describe(documents: list[Document]) -> dict[str, dict[str, int]]:
    tokens: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for document in documents:
        tokens[document.domain] += len(document.ids)
        counts[document.domain] += 1
        num_bytes[document.domain] += document.num_bytes
    return {
        domain: {"documents": counts[domain], "tokens": tokens[domain], "bytes": num_bytes[domain]}
        for domain in sorted(counts)
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build(output: Path = OUTPUT) -> dict[str, object]:
    """Write all token files and `meta.json` below `output`; returns the content of `meta.json`."""
    vocabulary = Vocabulary.from_file()
    stories = list(build_story_documents(vocabulary))
    num_story_tokens = sum(len(document.ids) for document in stories)
    num_templated_tokens = round(num_story_tokens * TEMPLATED_SHARE / (1 - TEMPLATED_SHARE))
    templated = list(build_templated_documents(vocabulary, num_templated_tokens))
    streams = {
        "train": [d for d in stories + templated if not d.heldout],
        "heldout_stories": [d for d in stories if d.heldout],
        "heldout_templated": [d for d in templated if d.heldout],
    }
    Random("decodegrid:order").shuffle(streams["train"])
    output.mkdir(parents=True, exist_ok=True)
    num_tokens = {name: write_stream(output, name, docs) for name, docs in streams.items()}
    meta: dict[str, object] = {
        "vocab_size": vocabulary.full.get_vocab_size(),
        "bos_token_id": vocabulary.ids.bos,
        "eos_token_id": vocabulary.ids.eos,
        "pad_token_id": vocabulary.ids.pad,
        "noise_token_id": vocabulary.ids.noise,
        "ignored_target_ids": [vocabulary.ids.bos],
        "template_seed": TEMPLATE_SEED,
        "sha256": {"stories": _sha256(CORPUS), "tokenizer": _sha256(TOKENIZER_FILE)},
        "tokens": num_tokens,
        "domains": {name: _describe(docs) for name, docs in streams.items()},
    }
    (output / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    return meta


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Build the token files for training.")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    start = time.perf_counter()
    meta = build(arguments.output)
    print(json.dumps(meta, indent=1))
    print(f"{time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
