"""Text to ids and back: bytes, special tokens, characters split over tokens, the chat frame."""

import json
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import deepseek_recipe as recipe
import pytest
import tokenizers

from decodegrid.configs.load import CONFIGS_DIR, EMBEDDED_CHECKPOINT
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.tokenizer import ChatMessage, Tokenizer

TEXTS = [
    "plain",
    "na\u00efve \u2014 \u20ac",
    "\u4f60\u597d\U0001f600",
    "a\u0301\u200d\U0001f469",
    "\x00\t\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_byte_a_token(tokenizer: Tokenizer, byte_id: Callable[[int], int], text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == [0, *map(byte_id, text.encode())]
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_pieces_hold_whole_characters(tokenizer: Tokenizer, text: str, size: int) -> None:
    ids = tokenizer.encode(text)[1:]
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text and detokenizer.flush() == ""


def test_broken_bytes_come_out_as_in_a_whole_decode(
    tokenizer: Tokenizer, byte_id: Callable[[int], int]
) -> None:
    data = b"ok\xe4\xbd\xff\xf0\x9f\x98\x80\x80z\xf0\x9f\x98"
    ids = [byte_id(byte) for byte in data]
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert pieces[2] == pieces[3] == "", "the start of a character is held back"
    assert pieces[-3:] == ["", "", ""]
    assert "".join(pieces) + detokenizer.flush() == data.decode(errors="replace")
    assert tokenizer.decode(ids) == data.decode(errors="replace")


def test_bytes_agree_with_the_tokenizers_library(tokenizer: Tokenizer) -> None:
    library = tokenizers.Tokenizer.from_file(str(tokenizer.path))
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.decode([token_id]) == library.decode([token_id], skip_special_tokens=True)
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_the_embedded_tokenizer() -> None:
    """Merged pieces: random ids decode as in the library, texts come back, chat has its frame."""
    embedded = Tokenizer(CONFIGS_DIR / EMBEDDED_CHECKPOINT / "tokenizer.json")
    assert (embedded.bos_token_id, embedded.eos_token_id) == (0, 1)
    library = tokenizers.Tokenizer.from_file(str(embedded.path))
    rng = random.Random(5)
    for _ in range(200):
        ids = [rng.randrange(embedded.vocab_size) for _ in range(rng.randrange(1, 40))]
        expected = library.decode(ids, skip_special_tokens=True)
        detokenizer = embedded.detokenizer()
        pieces = [detokenizer.push([token_id]) for token_id in ids]
        assert "".join(pieces) + detokenizer.flush() == embedded.decode(ids) == expected
    for text in (*TEXTS, "Once upon a time, there were 12 foxes."):
        ids = embedded.encode(text)
        assert embedded.decode(ids) == text and len(ids) <= 1 + len(text.encode())
        assert ids[1:] == embedded.encode_chat([ChatMessage("user", text)])[2:-2]


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """The server's event loop is one of them. An encoder that keeps them waiting gives this thread
    a turn or two at its ends; another one gives more, unless the machine has none to give."""
    embedded = Tokenizer(CONFIGS_DIR / EMBEDDED_CHECKPOINT / "tokenizer.json")

    def num_turns(pool: ThreadPoolExecutor) -> int:
        began, ended, count = threading.Event(), threading.Event(), 0

        def encode() -> list[int]:
            began.set()
            try:
                return embedded.encode("a b " * 50_000)
            finally:
                ended.set()

        found = pool.submit(encode)
        assert began.wait(60)
        while not ended.wait(0.001):
            count += 1
        assert len(found.result()) == 100_002
        return count

    with ThreadPoolExecutor(1) as pool:
        is_free = any(num_turns(pool) > 10 for _ in range(20))
    assert is_free, "the encoder kept the other threads waiting"


def test_special_tokens_in_a_prompt_are_plain_text(
    tokenizer: Tokenizer, byte_id: Callable[[int], int]
) -> None:
    text = "x" + recipe.SpecialToken.Eos.default_str()
    assert tokenizer.encode(text)[1:] == [byte_id(byte) for byte in text.encode()]
    frame = tokenizer.encode_chat([ChatMessage("user", text)])
    assert frame.count(tokenizer.eos_token_id) == 0


def test_chat_frame(tokenizer: Tokenizer) -> None:
    conversation = [
        ChatMessage("system", "s"),
        ChatMessage("user", "q"),
        ChatMessage("assistant", "a"),
        ChatMessage("user", "r"),
    ]
    ids = tokenizer.encode_chat(conversation)
    library = tokenizers.Tokenizer.from_file(str(tokenizer.path))
    token = recipe.SpecialToken
    bos, system, user, assistant, end, eos = (
        kind.default_str()
        for kind in (
            token.Bos,
            token.System,
            token.User,
            token.Assistant,
            token.ThinkingEnd,
            token.Eos,
        )
    )
    expected = f"{bos}{system}s{user}q{assistant}{end}a{eos}{user}r{assistant}{end}"
    assert library.decode(ids, skip_special_tokens=False) == expected


def test_a_conversation_ends_with_a_question(tokenizer: Tokenizer) -> None:
    for messages in ([], [ChatMessage("user", "q"), ChatMessage("assistant", "a")]):
        with pytest.raises(RequestError, match="must end with"):
            tokenizer.encode_chat(messages)
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode_chat([ChatMessage("user", "\udcff")])


def test_bad_files_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(FileNotFoundError):
        Tokenizer(path)
    text = tokenizer.path.read_text(encoding="utf-8")
    path.write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer.json: not a readable tokenizer"):
        Tokenizer(path)
    path.write_text(json.dumps({**json.loads(text), "decoder": {"type": "Fuse"}}))
    with pytest.raises(ValueError, match="must be ByteLevel"):
        Tokenizer(path)
    eos = recipe.SpecialToken.Eos.default_str()
    path.write_text(text.replace(eos, "<end>"), encoding="utf-8")
    with pytest.raises(ValueError, match="no special token"):
        Tokenizer(path)
