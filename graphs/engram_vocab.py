"""Compressed token ids of the engram.

Owns: the map from token id to compressed class, made from a tokenizer alone. Does not own: the hash
and the tables that use it. Data flow: tokenizer -> one class number per token id -> n-gram hash.
Tokens whose texts differ only in case, accents, compatibility forms or white space share a class.
"""

from tokenizers import Regex, Tokenizer, normalizers

_REPLACEMENT = "\ufffd"
"""Decoding puts it where a token's bytes are not UTF-8 on their own."""
_SPACE_SENTINEL = "\ue000"
"""Private-use character that carries a lone space past the stripping."""


def make_class_normalizer() -> normalizers.Normalizer:
    """The text normalisation that decides which tokens share a class."""
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"\A \z"), _SPACE_SENTINEL),
            normalizers.Strip(),
            normalizers.Replace(_SPACE_SENTINEL, " "),
        ]
    )


def compressed_token_classes(tokenizer: Tokenizer) -> list[int]:
    """The compressed class of each token id, `len == tokenizer.get_vocab_size()`.

    Classes are numbered 0, 1, 2, ... in the order of their first token id, so `max(result) + 1` is
    the number of classes, which a checkpoint states as `engram_compressed_vocab_size`. Special
    tokens count as their spelling.

    Raises:
        ValueError: the tokenizer's ids have a gap, so that some id has no token.

    Source: DeepSeek-V4.1 `engram.py`, the compressed tokenizer.
    """
    normalizer = make_class_normalizer()
    class_of_key: dict[str, int] = {}
    classes: list[int] = []
    num_tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    for token_id in range(num_tokens):
        piece = tokenizer.id_to_token(token_id)
        if piece is None:
            raise ValueError(f"tokenizer has {num_tokens} tokens, but none with id {token_id}")
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        # An empty normal form (a lone accent, say) would merge unrelated tokens: keep the text.
        key = piece if _REPLACEMENT in text else normalizer.normalize_str(text) or text
        classes.append(class_of_key.setdefault(key, len(class_of_key)))
    return classes
