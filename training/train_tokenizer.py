"""Trains the tokenizer of the embedded model: `python -m training.train_tokenizer`.

Owns: the pre-tokenisation and the merges. Does not own: the ids of the special tokens
(`vocabulary`). Data flow: stories + templated conversations -> byte-level BPE with 2048 tokens ->
configs/tiny/tokenizer.json. No normaliser, all 256 bytes in the alphabet: any text decodes to
itself. Every digit is a token of its own, so that numbers are copied and added digit by digit.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from training.render import render_conversation
from training.stories import choose_prompt, read_stories
from training.templates import generate
from training.vocabulary import (
    LEADING_SPECIALS,
    MARKUP_TOKENS,
    NOISE,
    TOKENIZER_FILE,
    VOCAB_SIZE,
)

SPLIT_PATTERN = (
    r"'(?:s|t|d|m|ll|ve|re)(?!\p{L})"
    r"| ?[\p{L}\p{M}]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
"""Words with the space before them, single digits, runs of punctuation, white space."""

TEMPLATE_SEED = 11
TEMPLATE_COUNT = 6000
"""Conversations for the merges: about a third of the bytes."""


def iterate_plain_texts(num_conversations: int = TEMPLATE_COUNT) -> Iterator[str]:
    """The training text without special tokens."""
    for story in read_stories():
        yield story.text
        yield choose_prompt(story)
    for conversation in generate(TEMPLATE_SEED, num_conversations):
        for piece, special in render_conversation(conversation).pieces():
            if not special:
                yield piece


def train_tokenizer(texts: Iterator[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly `vocab_size` ids, special tokens included.

    Ids 0.. are `LEADING_SPECIALS`, the last id is `NOISE`.

    Raises:
        ValueError: the text has too few different words for `vocab_size` tokens.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [
            Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = ByteLevelDecoder()
    leading = [AddedToken(token, special=True, normalized=False) for token in LEADING_SPECIALS]
    trainer = BpeTrainer(
        vocab_size=vocab_size - 1,
        special_tokens=leading,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(NOISE, special=True, normalized=False)])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text gives {tokenizer.get_vocab_size()} tokens, {vocab_size} were asked for"
        )
    # The trainer marks all of them special; markup that belongs to an answer has to survive
    # `decode(skip_special_tokens=True)`.
    layout = json.loads(tokenizer.to_str())
    for token in layout["added_tokens"]:
        token["special"] = token["content"] not in MARKUP_TOKENS
    return Tokenizer.from_str(json.dumps(layout, ensure_ascii=False))


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Train the tokenizer of the embedded model.")
    parser.add_argument("--output", type=Path, default=TOKENIZER_FILE)
    arguments = parser.parse_args()
    tokenizer = train_tokenizer(iterate_plain_texts())
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.output))
    print(f"{arguments.output}: {tokenizer.get_vocab_size()} tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
