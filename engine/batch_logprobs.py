"""Log-probabilities in the bodies of OpenAI's API.

Owns the fields that ask for them and the two forms of the answer. Data flow: fields of a body ->
numbers for SamplingParams; the dictionaries of a result -> JSON.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from decodegrid.engine.logprobs import Logprob, TokenLogprobs
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.runner_protocol import MAX_TOP_LOGPROBS
from decodegrid.engine.sampling_checks import check_int, show
from decodegrid.engine.tokenizer import Tokenizer

Json = Any
"""What json.loads makes."""

MIN_LOGPROB: Final = -9999.0
"""Stands for anything below it: JSON has no infinity."""


def num_logprobs(kind: Literal["completion", "chat"], fields: Mapping[str, Json]) -> int | None:
    """`SamplingParams.logprobs` for the fields logprobs and top_logprobs of a body.

    A completion's `logprobs` is the number itself; a chat's is a switch, and `top_logprobs` the
    number. Raises RequestError that begins with the field's name.
    """
    logprobs = fields.get("logprobs", False)
    if kind == "completion":
        if "top_logprobs" in fields:
            raise RequestError("top_logprobs is a field of chats; a completion has logprobs")
        if logprobs is False:
            return None
        check_int("logprobs", logprobs, 0, MAX_TOP_LOGPROBS)
        return int(logprobs)
    if not isinstance(logprobs, bool):
        raise RequestError(
            f"logprobs must be true or false in a chat, where top_logprobs is the number, "
            f"got {show(logprobs)}"
        )
    top = fields.get("top_logprobs", 0)
    check_int("top_logprobs", top, 0, MAX_TOP_LOGPROBS)
    if top and not logprobs:
        raise RequestError(f"top_logprobs is {top}, but logprobs is not true")
    return int(top) if logprobs else None


def completion_logprobs(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Json]:
    """The `logprobs` of a completion's choice: four lists with an item a token.

    Each token stands in its own `top_logprobs` too, so that they may have one more than was asked
    for. Offsets count characters of the completion's text.
    """
    texts, offsets, offset = [], [], 0
    tops: list[dict[str, float]] = []
    chosen = []
    for entries in tokens:
        token_id, own = next(iter(entries.items()))
        texts.append(token_text(token_id, own, tokenizer))
        chosen.append(_json_logprob(own))
        offsets.append(offset)
        offset += len(own.decoded_token or "")
        top: dict[str, float] = {}
        for other_id, entry in entries.items():
            # Of tokens with one text, the likelier stands for it.
            top.setdefault(token_text(other_id, entry, tokenizer), _json_logprob(entry))
        tops.append(top)
    return {
        "tokens": texts,
        "token_logprobs": chosen,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def chat_logprobs(
    tokens: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer
) -> dict[str, Json]:
    """The `logprobs` of a chat's choice. num_top: most probable tokens to list with each."""
    content = []
    for entries in tokens:
        token_id, own = next(iter(entries.items()))
        item = _chat_item(token_id, own, tokenizer)
        # The token itself is among them only if it is that probable.
        item["top_logprobs"] = [
            _chat_item(other_id, entry, tokenizer)
            for other_id, entry in sorted(entries.items(), key=_rank_of)
            if entry.rank is not None and entry.rank <= num_top
        ]
        content.append(item)
    return {"content": content}


def prompt_logprobs_json(tokens: Sequence[TokenLogprobs | None]) -> list[Json]:
    """`prompt_logprobs` as vLLM's server gives them: by token id, null for the first token."""
    return [
        None
        if entries is None
        else {
            str(token_id): {
                "logprob": _json_logprob(entry),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in entries.items()
        }
        for entries in tokens
    ]


def token_text(token_id: int, entry: Logprob, tokenizer: Tokenizer) -> str:
    """What stands for a token: the text it adds, else a special token's name, else its bytes, as in
    `bytes:\\xe2\\x82` for a part of a character."""
    if entry.decoded_token:
        return entry.decoded_token
    if not tokenizer.token_bytes(token_id):
        return tokenizer.spelled_bytes(token_id).decode("utf-8", errors="replace")
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token_id))


def _chat_item(token_id: int, entry: Logprob, tokenizer: Tokenizer) -> dict[str, Json]:
    return {
        "token": token_text(token_id, entry, tokenizer),
        "logprob": _json_logprob(entry),
        "bytes": list(tokenizer.spelled_bytes(token_id)),
    }


def _json_logprob(entry: Logprob) -> float:
    return max(entry.logprob, MIN_LOGPROB)


def _rank_of(item: tuple[int, Logprob]) -> int:
    rank = item[1].rank
    return MAX_TOP_LOGPROBS + 1 if rank is None else rank
