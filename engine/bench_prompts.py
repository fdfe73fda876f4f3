"""What the benchmark asks: built-in chats drawn by a seed, or the lines of a file.

Owns the texts and the way to token ids of a wanted length. Data flow: kind and seed, or a file ->
chats -> token ids up to where the assistant speaks -> with earlier text before them, a context of
exactly the wanted length.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from decodegrid.engine.cli_input import decode_utf8
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.tokenizer import ChatMessage, Tokenizer

PromptKind = Literal["mixed", "structured", "stories"]

_NAMES = ("Ines", "Omar", "Lena", "Pavel", "Mira", "Tomas", "Aiko", "Jonas", "Nadia", "Felix")
_CITIES = ("Oslo", "Lima", "Porto", "Kyoto", "Dakar", "Quito", "Turin", "Bergen")
_JOBS = ("baker", "pilot", "nurse", "tailor", "gardener", "painter", "driver", "teacher")
_THINGS = ("lamp", "river", "goat", "kettle", "ladder", "pearl", "basket", "whistle", "anchor")
_HEROES = ("a brave rabbit", "a curious girl", "a sleepy bear", "a kind farmer", "a clever fox")
_FINDS = ("a silver key", "a lost kite", "a jar of honey", "a tiny door", "an old map")
_PLACES = ("the old bridge", "the lake", "the river", "the barn", "the harbor", "the pond")
_MOODS = ("happy", "tired", "surprised", "proud", "quiet")


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Where the chats come from."""

    kind: PromptKind
    lines: tuple[str, ...] = ()
    """Of a file, one message of a user each; given, they are asked in turns instead of `kind`."""

    @classmethod
    def of_file(cls, path: Path) -> "PromptSource":
        """The lines of a file, empty ones skipped. Raises RequestError or OSError."""
        text = decode_utf8(str(path), path.read_bytes())
        lines = tuple(line for line in map(str.strip, text.split("\n")) if line)
        if not lines:
            raise RequestError(f"{path}: no prompt in it")
        return cls("mixed", lines)

    def texts(self, count: int, seed: int) -> list[str]:
        """Messages of a user; the same for the same seed. A file's lines come in turns, beginning
        at another one for each seed."""
        if self.lines:
            return [self.lines[(seed + index) % len(self.lines)] for index in range(count)]
        rng = random.Random(seed)
        asks = {"structured": (_structured,), "stories": (_story,)}
        makers = asks.get(self.kind, (_structured, _story))
        return [makers[index % len(makers)](rng) for index in range(count)]

    def describe(self) -> str:
        """A phrase for the report."""
        if self.lines:
            return f"{len(self.lines)} lines of a file, each a chat of one message"
        words = {"structured": "structured chats", "stories": "chats that ask for a story"}
        return words.get(self.kind, "structured chats and stories in turns")


def make_prompts(
    source: PromptSource, tokenizer: Tokenizer, count: int, seed: int, context_len: int | None
) -> list[tuple[int, ...]]:
    """Token ids of `count` prompts; the same for the same seed.

    context_len: None for the chats as they are. Otherwise every prompt has that many tokens: prose
    stands between the begin-of-sentence token and the chat, other prose for each prompt; of a chat
    that is longer the end is kept. Raises RequestError for a text that cannot be encoded.
    """
    chats = [
        tuple(tokenizer.encode_chat([ChatMessage("user", text)]))
        for text in source.texts(count, seed)
    ]
    if context_len is None:
        return chats
    rng = random.Random(f"prose {seed}")
    return [_lengthen(chat, context_len, tokenizer, rng) for chat in chats]


def _lengthen(
    chat: tuple[int, ...], context_len: int, tokenizer: Tokenizer, rng: random.Random
) -> tuple[int, ...]:
    first, rest = chat[:1], chat[1:]
    num_missing = context_len - len(chat)
    if num_missing <= 0:
        kept = rest[len(rest) - (context_len - 1) :] if context_len > 1 else ()
        return (*first, *kept)
    prose: list[int] = []
    while len(prose) < num_missing:
        prose += tokenizer.encode(" ".join(_sentence(rng) for _ in range(16)) + "\n")[1:]
    return (*first, *prose[:num_missing], *rest)


def _structured(rng: random.Random) -> str:
    name, age = rng.choice(_NAMES), rng.randint(18, 80)
    city, job = rng.choice(_CITIES), rng.choice(_JOBS)
    numbers = ", ".join(str(rng.randint(1, 99)) for _ in range(rng.randint(4, 9)))
    things = ", ".join(rng.sample(_THINGS, rng.randint(3, 5)))
    return rng.choice(
        (
            f"Make a JSON object: {name}, {age}, works in {city} as a {job}.",
            f"Write as JSON: {name} is {age} years old and lives in {city}.",
            f"Make a JSON array: {numbers}",
            f"Reverse as JSON: {things}",
            f"Write a Python function that multiplies a number by {age}. Call it scale.",
        )
    )


def _story(rng: random.Random) -> str:
    who, what, where = rng.choice(_HEROES), rng.choice(_FINDS), rng.choice(_PLACES)
    return f"Write a short children's story about {who} who finds {what} near {where}."


def _sentence(rng: random.Random) -> str:
    who, what, where = rng.choice(_HEROES), rng.choice(_FINDS), rng.choice(_PLACES)
    name, mood = rng.choice(_NAMES), rng.choice(_MOODS)
    return rng.choice(
        (
            f"One day {name} went to {where} with {who}.",
            f"Near {where} there was {what}, and {name} was {mood}.",
            f"{name} looked at {what} and felt {mood} for a while.",
            f"Then {who} came back from {where} and showed {name} {what}.",
        )
    )
