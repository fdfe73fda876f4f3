"""The compressed classes against a second implementation on `unicodedata`, and by hand."""

import re
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE, WordLevel

from decodegrid.graphs.engram_vocab import compressed_token_classes

TINY = Path(__file__).parents[2] / "configs" / "tiny" / "tokenizer.json"


def class_key(text: str) -> str:
    """The rule, written with the standard library."""
    normal = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    normal = "".join(c for c in normal if not unicodedata.category(c).startswith("M")).lower()
    normal = re.sub(r"[ \t\r\n]+", " ", normal)
    if normal != " ":
        normal = normal.strip()
    return normal or text


def number_keys(keys: list[str]) -> list[int]:
    order = list(dict.fromkeys(keys))
    return [order.index(key) for key in keys]


def make_word_tokenizer(words: list[str]) -> Tokenizer:
    return Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token=words[0]))


def test_hand_made_classes() -> None:
    words = [
        "cat",
        "Cat",
        " cat",
        "\u00e9t\u00e9",
        "ete",
        "E\u0301TE",
        " ",
        "\t",
        "\n\n",
        "\u0301",
        "\ufb01x",
        "FIX",
        "",
    ]
    assert compressed_token_classes(make_word_tokenizer(words)) == [
        0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 4, 5,
    ]  # fmt: skip


def test_partial_bytes_keep_their_piece() -> None:
    """Tokens of broken UTF-8 all decode to the replacement character but stay apart."""
    tokenizer = Tokenizer(BPE({"\u00c3": 0, "\u00a9": 1, "\u00c3\u00a9": 2, "e": 3, "E": 4}, []))
    tokenizer.decoder = ByteLevel()
    assert [tokenizer.decode([n]) for n in range(3)] == ["\ufffd", "\ufffd", "\u00e9"]
    assert compressed_token_classes(tokenizer) == [0, 1, 2, 2, 2]


def test_embedded_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(TINY))
    keys = []
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        keys.append(tokenizer.id_to_token(token_id) if "\ufffd" in text else class_key(text))
    classes = compressed_token_classes(tokenizer)
    assert classes == number_keys(keys)
    assert len(classes) == 2048
    assert classes[:3] == [0, 1, 2]
    assert sorted(set(classes)) == list(range(max(classes) + 1))


def test_gap_in_ids_is_an_error() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 2}, unk_token="a"))
    with pytest.raises(ValueError, match="none with id 1"):
        compressed_token_classes(tokenizer)
