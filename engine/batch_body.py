"""The body of an OpenAI completion request, and the body of its answer.

Owns which fields are understood and what they mean here. Every field is honoured, or asks for what
happens anyway (such as `stream: false`), or is refused by name; none is dropped. Beside OpenAI's
fields those of SamplingParams are understood. Log-probabilities have a file of their own. Data
flow: body -> prompt and SamplingParams; RequestOutput -> body.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from decodegrid.configs.sampling_section import SamplingSection
from decodegrid.engine.batch_form import FORM_FIELDS, read_form
from decodegrid.engine.batch_logprobs import (
    Json,
    chat_logprobs,
    completion_logprobs,
    num_logprobs,
    prompt_logprobs_json,
)
from decodegrid.engine.chat_answer import read_answer
from decodegrid.engine.chat_body import CHAT_FIELDS, BodyError, ChatForm, kind_name, read_chat
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.request_output import CompletionOutput, RequestOutput
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.vllm_fields import SAMPLING_VALUES

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
_OPTIONS: Final = "stream_options"
_STREAM: Final = ("stream", _OPTIONS)

INERT: Final[Mapping[str, tuple[Json, ...]]] = {
    "echo": (False,),
    "suffix": ("",),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    **SAMPLING_VALUES,
}
"""Fields that must ask for what happens anyway: null, or one of these values."""
_LABELS: Final = ("model", "user")
"""Say whose request it is and for which model; `user` goes nowhere."""
_LENGTHS: Final = ("max_tokens", "max_completion_tokens")
_COMMON: Final = frozenset(
    {*_LABELS, "max_tokens", *_SAMPLING, *_LOGPROBS, *FORM_FIELDS, *_STREAM, *INERT}
)
_KNOWN: Final[Mapping[Kind, frozenset[str]]] = {
    "completion": _COMMON | {"prompt"},
    "chat": _COMMON | {*CHAT_FIELDS, *_LENGTHS},
}
"""Every field that a body may have."""


@dataclass(frozen=True, slots=True)
class BodyRequest:
    """What a body asks for."""

    kind: Kind
    model: str
    prompt: str | list[int]
    params: SamplingParams
    chat: ChatForm | None = None
    """Of a chat: what its answers hold."""
    num_asked: int | None = None
    """max_tokens, where the body gives it."""
    length_field: str = "max_tokens"
    """The name under which it is given."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with a chunk of the usage."""


@dataclass(slots=True)
class AnswerUsage:
    """Tokens of an answer."""

    num_prompt: int
    num_cached: int
    num_output: int = 0
    num_reasoning: int | None = field(default=None)
    """None where the answer has no reasoning."""

    def body(self) -> dict[str, Json]:
        """The `usage` of an answer."""
        usage: dict[str, Json] = {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }
        if self.num_reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return usage


def read_body(
    kind: Kind,
    body: Json,
    tokenizer: Tokenizer,
    defaults: SamplingSection,
    *,
    may_stream: bool = False,
) -> BodyRequest:
    """Check a body. defaults: for temperature, max_tokens, top_p and top_k that are not given.
    may_stream: whether the answer can come in pieces.

    Raises RequestError, BodyError where a field is to blame.
    """
    if not isinstance(body, dict):
        raise BodyError(f"body must be an object, got {kind_name(body)}", "body")
    fields = {name: value for name, value in body.items() if value is not None}
    for name in body:
        if name not in _KNOWN[kind]:
            raise BodyError(f"{name} is not supported", name)
    for name, values in INERT.items():
        if name in fields and not any(_is_same(fields[name], value) for value in values):
            raise BodyError(f"{name}={_shown(fields[name])} is not supported", name)
    for name in _LABELS:
        if not isinstance(fields.get(name, ""), str):
            raise BodyError(f"{name} must be a string, got {kind_name(fields[name])}", name)
    stream, include_usage = _read_stream(fields, may_stream=may_stream)
    chat: ChatForm | None = None
    prompt: str | list[int]
    if kind == "completion":
        prompt = _read_prompt(fields)
    else:
        prompt, chat = read_chat(fields, tokenizer)
        fields |= _fields_of_form(chat, fields, tokenizer)
    params = _read_params(kind, fields, defaults)
    length = next((name for name in _LENGTHS if name in fields), "max_tokens")
    return BodyRequest(
        kind,
        fields.get("model", ""),
        prompt,
        params,
        chat=chat,
        num_asked=fields.get(length),
        length_field=length,
        stream=stream,
        include_usage=include_usage,
    )


def answer_body(
    request: BodyRequest, output: RequestOutput, created: int, tokenizer: Tokenizer
) -> dict[str, Json]:
    """The body that answers a request. created: seconds since 1970."""
    usage = AnswerUsage(len(output.prompt_token_ids), output.num_cached_tokens)
    choices = [_choice(request, completion, tokenizer, usage) for completion in output.outputs]
    extra: dict[str, Json] = {}
    if output.prompt_logprobs is not None:
        extra["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
    if request.kind == "completion":
        choices = [{**choice, **extra} for choice in choices]
        extra = {}
    return {
        "id": answer_id(request.kind, output.request_id),
        "object": "chat.completion" if request.kind == "chat" else "text_completion",
        "created": created,
        "model": request.model,
        "choices": choices,
        **extra,
        "usage": usage.body(),
        "speculation": {
            "num_drafted": output.num_drafted,
            "num_verified": output.num_verified,
            "num_accepted": output.num_accepted,
        },
    }


def answer_id(kind: Kind, request_id: str) -> str:
    """The `id` of an answer."""
    return f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{request_id}"


def _choice(
    request: BodyRequest, completion: CompletionOutput, tokenizer: Tokenizer, usage: AnswerUsage
) -> dict[str, Json]:
    """A choice of an answer, whose tokens are added to its usage."""
    choice: dict[str, Json] = {"index": completion.index}
    tokens, num_top = completion.logprobs, request.params.logprobs
    usage.num_output += len(completion.token_ids)
    reason: str | None = completion.finish_reason
    if request.chat is not None and request.chat.is_parsed:
        choice["message"], reason, num_reasoning = read_answer(request.chat, completion, tokenizer)
        if request.chat.is_thinking:
            usage.num_reasoning = (usage.num_reasoning or 0) + num_reasoning
    elif request.kind == "chat":
        choice["message"] = {"role": "assistant", "content": completion.text}
    else:
        choice["text"] = completion.text
    if tokens is None or num_top is None:
        choice["logprobs"] = None
    elif request.kind == "chat":
        choice["logprobs"] = chat_logprobs(tokens, num_top, tokenizer)
    else:
        choice["logprobs"] = completion_logprobs(tokens, tokenizer)
    choice["finish_reason"] = reason
    choice["stop_reason"] = completion.stop_reason
    return choice


def _read_params(
    kind: Kind, fields: Mapping[str, Json], defaults: SamplingSection
) -> SamplingParams:
    given = {name: fields[name] for name in _SAMPLING if name in fields}
    for name in ("temperature", "top_p", "top_k"):
        given.setdefault(name, getattr(defaults, name))
    lengths = [name for name in _LENGTHS if name in fields]
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
    message = "prompt must be a string or a list of token ids; one prompt a request"
    raise BodyError(message, "prompt")


def _read_stream(fields: Mapping[str, Json], *, may_stream: bool) -> tuple[bool, bool]:
    """Whether the answer comes in pieces, and with a chunk of its usage at the end."""
    stream, options = fields.get("stream", False), fields.get("stream_options")
    if not isinstance(stream, bool):
        raise BodyError(f"stream must be true or false, got {_shown(stream)}", "stream")
    if stream and not may_stream:
        raise BodyError("stream=True is not supported", "stream")
    if options is None:
        return stream, False
    if not stream:
        raise BodyError("stream_options is given, but stream is not true", "stream_options")
    if not isinstance(options, dict):
        raise BodyError(f"stream_options must be an object, got {kind_name(options)}", _OPTIONS)
    for name, value in options.items():
        if name != "include_usage":
            raise BodyError(f"stream_options.{name} is not supported", _OPTIONS)
        if not isinstance(value, bool):
            raise BodyError(f"stream_options.{name} must be true or false", _OPTIONS)
    return stream, options.get("include_usage", False)


def _fields_of_form(
    chat: ChatForm, fields: Mapping[str, Json], tokenizer: Tokenizer
) -> dict[str, Json]:
    """Sampling fields that follow from what a chat's answers hold."""
    if not chat.is_parsed:
        return {}
    what = "tools" if chat.has_tools else "thinking"
    if "skip_special_tokens" in fields:
        name = "skip_special_tokens"
        raise BodyError(f"{name} has no meaning beside {what}, whose marks are special", name)
    for name in FORM_FIELDS:
        is_free = name == "response_format" and fields.get(name) == {"type": "text"}
        if name in fields and not is_free:
            raise BodyError(f"{name} beside {what} is not supported", name)
    return {"skip_special_tokens": False}


def _is_same(value: Json, wanted: Json) -> bool:
    """Equal and of one type: false is not 0."""
    return type(value) is type(wanted) and value == wanted


def _shown(value: Json) -> str:
    """A value in an error, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
