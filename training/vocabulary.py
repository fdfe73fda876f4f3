"""The tokenizer of the embedded model: its special tokens and how a rendered document becomes ids.

Owns: the order of the special tokens, the encoding of plain text without them, the mark of answer
tokens. Does not own: training the merges (`train_tokenizer`). Data flow: tokenizer.json +
`Rendered` -> ids.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import deepseek_recipe as recipe
from tokenizers import Tokenizer

from training.render import Rendered

TOKENIZER_FILE = Path(__file__).parent.parent / "configs" / "tiny" / "tokenizer.json"
VOCAB_SIZE = 2048
PAD = "<\uff5c\u2581pad\u2581\uff5c>"
NOISE = "<\uff5cnoise\uff5c>"

_KIND = recipe.SpecialToken
LEADING_SPECIALS = (
    _KIND.Bos.default_str(),
    _KIND.Eos.default_str(),
    PAD,
    _KIND.User.default_str(),
    _KIND.Assistant.default_str(),
    _KIND.System.default_str(),
    _KIND.ThinkingStart.default_str(),
    _KIND.ThinkingEnd.default_str(),
    _KIND.Dsml.default_str(),
    _KIND.LatestReminder.default_str(),
    _KIND.Image.default_str(),
)
"""Special tokens with ids 0, 1, 2, ...: sentence frame, padding, and the text format of V4.1."""

MARKUP_TOKENS = frozenset(
    (_KIND.ThinkingStart.default_str(), _KIND.ThinkingEnd.default_str(), _KIND.Dsml.default_str())
)
"""Tokens that belong to an answer's text: `decode(skip_special_tokens=True)` keeps them."""


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids of the special tokens that code outside the prompt encoder needs."""

    bos: int
    eos: int
    pad: int
    assistant: int
    thinking_end: int
    noise: int
    """Input of the drafter's block rows after the first; never in a text."""


class Vocabulary:
    """A tokenizer.json, ready to encode rendered documents."""

    def __init__(self, text: str) -> None:
        """`text` is the content of a tokenizer.json.

        Raises:
            ValueError: a special token is missing.
        """
        self.full = Tokenizer.from_str(text)
        # Without added tokens, a special token's spelling inside plain text stays plain text.
        layout = json.loads(text)
        layout["added_tokens"] = []
        self._plain = Tokenizer.from_str(json.dumps(layout))
        self.ids = SpecialIds(
            bos=self._special_id(_KIND.Bos.default_str()),
            eos=self._special_id(_KIND.Eos.default_str()),
            pad=self._special_id(PAD),
            assistant=self._special_id(_KIND.Assistant.default_str()),
            thinking_end=self._special_id(_KIND.ThinkingEnd.default_str()),
            noise=self._special_id(NOISE),
        )

    @classmethod
    def from_file(cls, path: Path = TOKENIZER_FILE) -> "Vocabulary":
        """Read a tokenizer.json."""
        return cls(path.read_text(encoding="utf-8"))

    def _special_id(self, token: str) -> int:
        token_id = self.full.token_to_id(token)
        if token_id is None:
            raise ValueError(f"tokenizer has no special token {token!r}")
        return int(token_id)

    def encode(self, rendered: Rendered) -> list[int]:
        """Token ids of a document; only its special ranges become special tokens."""
        ids: list[int] = []
        for piece, special in rendered.pieces():
            if special:
                ids.append(self._special_id(piece))
            else:
                ids += self._plain.encode(piece, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, special tokens included."""
        return str(self.full.decode(ids, skip_special_tokens=False))

    def mark_answers(self, ids: list[int]) -> list[bool]:
        """Whether an assistant wrote a token of one document (end-of-sentence included).

        A document without a chat frame is an answer but for its begin-of-sentence token.
        """
        if self.ids.assistant not in ids:
            return [token != self.ids.bos for token in ids]
        marks, inside, previous = [], False, -1
        for token in ids:
            marks.append(inside)
            if token == self.ids.eos:
                inside = False
            elif token == self.ids.thinking_end and previous == self.ids.assistant:
                inside = True
            previous = token
        return marks
