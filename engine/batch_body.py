"""The body of an OpenAI completion request, and the body of its answer.

Owns which fields are understood and what they mean here. Every field is honoured, or asks for what
happens anyway (such as `stream: false`), or is refused by name; none is dropped. Beside OpenAI's
fields those of SamplingParams are understood. Log-probabilities have a file of their own. Data
flow: body -> prompt and SamplingParams; RequestOutput -> body.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from decodegrid.configs.sections import SamplingSection
from decodegrid.engine.batch_form import FORM_FIELDS, read_form
from decodegrid.engine.batch_logprobs import (
    Json,
    chat_logprobs,
    completion_logprobs,
    num_logprobs,
    prompt_logprobs_json,
)
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.request_output import CompletionOutput, RequestOutput
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import ChatMessage, Tokenizer

Kind = Literal["completion", "chat"]

URLS: Final[Mapping[str, Kind]] = {
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
}

_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "speculation",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "prompt_logprobs",
)
"""Fields that SamplingParams checks."""
_LOGPROBS: Final = ("logprobs", "top_logprobs")

_INERT: Final[Mapping[str, tuple[Json, ...]]] = {
    "stream": (False,),
    "stream_options": (),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
}
"""Fields that must ask for what happens anyway: null, or one of these values."""


class BodyError(RequestError):
    """A field that cannot be honoured."""

    def __init__(self, message: str, param: str | None) -> None:
        """param: the field."""
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class BodyRequest:
    """What a body asks for."""

    kind: Kind
    model: str
    prompt: str | list[int]
    params: SamplingParams


def read_body(
    kind: Kind, body: Json, tokenizer: Tokenizer, defaults: SamplingSection
) -> BodyRequest:
    """Check a body. defaults: for temperature, max_tokens, top_p and top_k that are not given.

    Raises RequestError, BodyError where a field is to blame.
    """
    if not isinstance(body, dict):
        raise BodyError(f"body must be an object, got {_kind_name(body)}", "body")
    fields = {name: value for name, value in body.items() if value is not None}
    source = "messages" if kind == "chat" else "prompt"
    lengths = ("max_tokens", "max_completion_tokens") if kind == "chat" else ("max_tokens",)
    known = {"model", "user", source, *lengths, *_SAMPLING, *_LOGPROBS, *FORM_FIELDS, *_INERT}
    for name in body:
        if name not in known:
            raise BodyError(f"{name} is not supported", name)
    for name, values in _INERT.items():
        if name in fields and not any(_is_same(fields[name], value) for value in values):
            raise BodyError(f"{name}={_shown(fields[name])} is not supported", name)
    for name in ("model", "user"):
        if not isinstance(fields.get(name, ""), str):
            raise BodyError(f"{name} must be a string, got {_kind_name(fields[name])}", name)
    prompt = _read_prompt(fields) if kind == "completion" else _read_chat(fields, tokenizer)
    return BodyRequest(kind, fields.get("model", ""), prompt, _read_params(kind, fields, defaults))


def answer_body(
    request: BodyRequest, output: RequestOutput, created: int, tokenizer: Tokenizer
) -> dict[str, Json]:
    """The body that answers a request. created: seconds since 1970."""
    choices = [_choice(request, completion, tokenizer) for completion in output.outputs]
    extra: dict[str, Json] = {}
    if output.prompt_logprobs is not None:
        extra["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
    if request.kind == "completion":
        choices = [{**choice, **extra} for choice in choices]
        extra = {}
    num_prompt = len(output.prompt_token_ids)
    num_output = sum(len(completion.token_ids) for completion in output.outputs)
    return {
        "id": f"{'chatcmpl' if request.kind == 'chat' else 'cmpl'}-{output.request_id}",
        "object": "chat.completion" if request.kind == "chat" else "text_completion",
        "created": created,
        "model": request.model,
        "choices": choices,
        **extra,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        },
        "speculation": {
            "num_drafted": output.num_drafted,
            "num_verified": output.num_verified,
            "num_accepted": output.num_accepted,
        },
    }


def _choice(
    request: BodyRequest, completion: CompletionOutput, tokenizer: Tokenizer
) -> dict[str, Json]:
    choice: dict[str, Json] = {"index": completion.index}
    tokens, num_top = completion.logprobs, request.params.logprobs
    if request.kind == "chat":
        choice["message"] = {"role": "assistant", "content": completion.text}
    else:
        choice["text"] = completion.text
    if tokens is None or num_top is None:
        choice["logprobs"] = None
    elif request.kind == "chat":
        choice["logprobs"] = chat_logprobs(tokens, num_top, tokenizer)
    else:
        choice["logprobs"] = completion_logprobs(tokens, tokenizer)
    choice["finish_reason"] = completion.finish_reason
    choice["stop_reason"] = completion.stop_reason
    return choice


def _read_params(
    kind: Kind, fields: Mapping[str, Json], defaults: SamplingSection
) -> SamplingParams:
    given = {name: fields[name] for name in _SAMPLING if name in fields}
    for name in ("temperature", "top_p", "top_k"):
        given.setdefault(name, getattr(defaults, name))
    lengths = [name for name in ("max_tokens", "max_completion_tokens") if name in fields]
    if len(lengths) == 2:
        raise BodyError("max_tokens and max_completion_tokens are both given", lengths[0])
    given["max_tokens"] = fields[lengths[0]] if lengths else defaults.max_tokens
    try:
        given["logprobs"] = num_logprobs(kind, fields)
        if isinstance(given.get("logit_bias"), dict):
            given["logit_bias"] = _read_logit_bias(given["logit_bias"])
        given["structured_outputs"] = read_form(fields)
        return SamplingParams(**given)
    except RequestError as error:
        message = str(error)
        known = ("max_tokens", *_SAMPLING, *_LOGPROBS, *FORM_FIELDS)
        params = [name for name in known if _names(message, name)]
        # max_tokens may have come under its other name.
        param = lengths[0] if params == ["max_tokens"] and lengths else next(iter(params), None)
        raise BodyError(message, param) from None


def _read_logit_bias(bias: Mapping[str, Json]) -> dict[int, Json]:
    """JSON's keys are strings; raises RequestError for one that is not a token id's digits."""
    found = {}
    for key, value in bias.items():
        # One spelling for an id, so that none is given twice; no id has as many digits as an int64.
        if not (key.isascii() and key.isdigit() and len(key) < 19 and str(int(key)) == key):
            raise RequestError(f"logit_bias must have token ids as its keys, got {_shown(key)}")
        found[int(key)] = value
    return found


def _names(message: str, name: str) -> bool:
    """Whether a refusal of SamplingParams is about the field: it begins with its name."""
    rest = message.removeprefix(name)
    return rest != message and not (rest[0].isalnum() or rest[0] == "_")


def _read_prompt(fields: Mapping[str, Json]) -> str | list[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return prompt
    # A bool is an int to Python; the engine refuses it as a token id.
    if isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
        return prompt
    raise BodyError("prompt must be a string or a list of token ids; one prompt a line", "prompt")


def _read_chat(fields: Mapping[str, Json], tokenizer: Tokenizer) -> list[int]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BodyError("messages must be a list of messages, and not empty", "messages")
    turns = [_read_message(index, message) for index, message in enumerate(messages)]
    try:
        return tokenizer.encode_chat(turns)
    except RequestError as error:
        raise BodyError(str(error), "messages") from None


def _read_message(index: int, message: Json) -> ChatMessage:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise BodyError(f"{where} must be an object, got {_kind_name(message)}", where)
    for name, value in message.items():
        if name not in ("role", "content") and value is not None:
            raise BodyError(f"{where}.{name} is not supported", f"{where}.{name}")
    role = message.get("role")
    if role not in ("system", "user", "assistant"):
        raise BodyError(
            f"{where}.role must be system, user or assistant, got {_shown(role)}", f"{where}.role"
        )
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [_text_of(part) for part in parts] if isinstance(parts, list) else [None]
    if any(text is None for text in texts):
        raise BodyError(
            f"{where}.content must be a string or a list of text parts", f"{where}.content"
        )
    return ChatMessage(role, "".join(text for text in texts if text is not None))


def _text_of(part: Json) -> str | None:
    """Text of a content part; None for any other kind of part."""
    if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
        return None
    return part["text"] if isinstance(part["text"], str) else None


def _is_same(value: Json, wanted: Json) -> bool:
    """Equal and of one type: false is not 0."""
    return type(value) is type(wanted) and value == wanted


def _kind_name(value: Json) -> str:
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")


def _shown(value: Json) -> str:
    """A value in an error, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
