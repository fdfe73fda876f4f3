"""Text to token ids and back, a character at a time.

Owns tokenizer.json, the begin-of-sentence token before plain prompts, the chat frame (through
deepseek-recipe) and the bytes of each token. Does not own the vocabulary's meaning to the model.
Prompts go in as text; emitted ids come back through an IncrementalDetokenizer, which works on
bytes, so that a character split over tokens is held back until it is whole.
"""

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import deepseek_recipe as recipe
import tokenizers

from decodegrid.engine.request_error import RequestError


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


def _byte_of_char() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary piece stands for.

    Printable Latin-1 bytes stand for themselves; the others, in order, for U+0100 onwards.
    Source: byte-level BPE as in GPT-2.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


class Tokenizer:
    """A byte-level BPE tokenizer.json with DeepSeek's special tokens."""

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json.

        Raises FileNotFoundError, and ValueError naming the file when it is no tokenizer, is not
        byte-level, or lacks the begin or end of sentence.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None
        try:
            layout = json.loads(text)
            self._full = tokenizers.Tokenizer.from_str(text)
            # Without added tokens, a special token's spelling in a prompt stays plain text.
            self._plain = tokenizers.Tokenizer.from_str(json.dumps({**layout, "added_tokens": []}))
            self._recipe = recipe.DeepseekV41Encoding().with_tokenizer(
                recipe.Tokenizer.from_str(text)
            )
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ValueError(f"{path}: not a readable tokenizer: {error}") from error
        if (layout.get("decoder") or {}).get("type") != "ByteLevel":
            raise ValueError(f"{path}: the decoder must be ByteLevel, got {layout.get('decoder')}")
        self.path = path
        self.bos_token_id = self._special_id(recipe.SpecialToken.Bos)
        self.eos_token_id = self._special_id(recipe.SpecialToken.Eos)
        thinking_end = self._full.token_to_id(recipe.SpecialToken.ThinkingEnd.default_str())
        self.thinking_end_id: int | None = thinking_end
        """Ends the reasoning of an answer; None where the file has no such token."""
        self._special_ids = frozenset(
            token["id"] for token in layout["added_tokens"] if token["special"]
        )
        marks = (recipe.SpecialToken.Dsml, recipe.SpecialToken.ThinkingEnd)
        ids = [self._full.token_to_id(mark.default_str()) for mark in marks]
        self.mark_bytes = {
            token_id: mark.default_str().encode("utf-8")
            for mark, token_id in zip(marks, ids, strict=True)
            if token_id is not None
        }
        """Spellings of the special tokens that stand inside of an answer, by token id."""
        self._byte_of_char = _byte_of_char()
        self._bytes_of_id: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id of the file, added tokens included."""
        return 1 + max(self._full.get_vocab(with_added_tokens=True).values())

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if the file has ids outside a model's vocabulary."""
        if self.vocab_size > vocab_size:
            raise ValueError(
                f"{self.path}: {self.vocab_size} tokens, "
                f"but the model's vocabulary has {vocab_size}"
            )

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt after the begin-of-sentence token.

        Special tokens spelled out in the text are plain text. Raises RequestError for a text that
        is not valid Unicode.
        """
        _check_unicode(text)
        return [self.bos_token_id, *self._plain.encode(text, add_special_tokens=False).ids]

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Ids of a conversation in the V4.1 format, without thinking, up to the next answer.

        Raises RequestError when the last message is the assistant's or a text is not Unicode.
        """
        if not messages or messages[-1].role == "assistant":
            raise RequestError("a conversation must end with a message of the user")
        for message in messages:
            _check_unicode(message.content)
        conversation = recipe.Conversation(
            [_recipe_message(message) for message in messages], thinking_mode=False
        )
        return list(self._recipe.encode(conversation))

    def encode_conversation(self, conversation: recipe.Conversation) -> list[int]:
        """Ids of a conversation of the recipe, up to the next answer; its texts are Unicode."""
        return list(self._recipe.encode(conversation))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids, special tokens left out or spelled; bytes that are no character become
        U+FFFD."""
        bytes_of = self.token_bytes if skip_special_tokens else self.spelled_bytes
        return b"".join(map(bytes_of, token_ids)).decode("utf-8", errors="replace")

    def detokenizer(self, *, skip_special_tokens: bool = True) -> "IncrementalDetokenizer":
        """A fresh incremental decoder; its pieces joined equal decode() of all the ids."""
        return IncrementalDetokenizer(
            self.token_bytes if skip_special_tokens else self.spelled_bytes
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token's text: none for a special token or an id without a token."""
        found = self._bytes_of_id.get(token_id)
        if found is None:
            found = self._make_token_bytes(token_id)
            self._bytes_of_id[token_id] = found
        return found

    def spelled_bytes(self, token_id: int) -> bytes:
        """Bytes of a token's text, where a special token's is its name, such as the end of text."""
        if token_id in self._special_ids:
            return str(self._full.id_to_token(token_id)).encode("utf-8")
        return self.token_bytes(token_id)

    def _make_token_bytes(self, token_id: int) -> bytes:
        piece = self._full.id_to_token(token_id)
        if piece is None or token_id in self._special_ids:
            return b""
        if all(char in self._byte_of_char for char in piece):
            return bytes(self._byte_of_char[char] for char in piece)
        return str(piece).encode("utf-8")

    def _special_id(self, token: recipe.SpecialToken) -> int:
        token_id = self._full.token_to_id(token.default_str())
        if token_id is None:
            raise ValueError(f"{self.path}: no special token {token.default_str()!r}")
        return int(token_id)


class IncrementalDetokenizer:
    """Turns ids into text as they come; never gives part of a character."""

    __slots__ = ("_bytes_of", "_decoder")

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """bytes_of: the bytes of a token's text."""
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became complete with these ids."""
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def peek(self, token_id: int) -> str:
        """What push would give for one id, which is not taken."""
        state = self._decoder.getstate()
        text = self._decoder.decode(self._bytes_of(token_id))
        self._decoder.setstate(state)
        return text

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, or nothing."""
        return self._decoder.decode(b"", final=True)


def _recipe_message(message: ChatMessage) -> recipe.Message:
    match message.role:
        case "system":
            return recipe.SystemMessage(message.content)
        case "user":
            return recipe.UserMessage(message.content)
        case "assistant":
            return recipe.AssistantMessage(message.content)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt is not valid Unicode: character {error.start} is {text[error.start]!r}"
        ) from error
