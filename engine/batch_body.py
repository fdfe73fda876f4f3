"""The body of an OpenAI completion request, and the body of its answer.

Owns which fields are understood and what they mean here. Every field is honoured, or asks for what
happens anyway (such as `stream: false`), or is refused by name; none is dropped. Beside OpenAI's
fields those of SamplingParams are understood. Log-probabilities have a file of their own. Data
flow: body -> prompt and SamplingParams; RequestOutput -> body.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
from decodegrid.engine.body_fields import (
    BodyError,
    check_inert,
    check_label,
    check_names,
    kind_name,
    shown,
    unknown_field,
)
from decodegrid.engine.chat_answer import read_answer
from decodegrid.engine.chat_body import CHAT_FIELDS, read_chat
from decodegrid.engine.conversations import ChatForm, thinking_end
from decodegrid.engine.grammar_calls import CallsParams
from decodegrid.engine.grammar_params import StructuredOutputsParams
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.request_output import CompletionOutput, RequestOutput
from decodegrid.engine.sampling_body import EXTRAS, make_params, sampling_error
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.vllm_fields import SAMPLING_VALUES

Kind = Literal["completion", "chat"]
Prompt = str | list[int]
"""A text, or token ids."""

URLS: Final[Mapping[str, Kind]] = {
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
}

_SAMPLING: Final = (
    *("temperature", "top_p", *EXTRAS, "n", "stop"),
    *("include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs"),
)
"""Fields that SamplingParams checks."""
_LOGPROBS: Final = ("logprobs", "top_logprobs")
_OPTIONS: Final = "stream_options"
_STREAM: Final = ("stream", _OPTIONS)
_STREAM_OPTIONS: Final = ("include_usage", "include_obfuscation")

INERT: Final[Mapping[str, tuple[Json, ...]]] = {
    "echo": (False,),
    "suffix": ("",),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    **SAMPLING_VALUES,
}
"""Fields that must ask for what happens anyway: null, or one of these values."""
_LABELS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "completion": ("model", "user"),
    "chat": ("model", "user", "safety_identifier", "prompt_cache_key"),
}
"""Say whose request it is and for which model; all but `model` go nowhere."""
_LENGTHS: Final = ("max_tokens", "max_completion_tokens")
_COMMON: Final = frozenset({"max_tokens", *_SAMPLING, *_LOGPROBS, *FORM_FIELDS, *_STREAM, *INERT})
FIELDS: Final[Mapping[Kind, frozenset[str]]] = {
    "completion": _COMMON | {"prompt", *_LABELS["completion"]},
    "chat": _COMMON | {*CHAT_FIELDS, *_LENGTHS, *_LABELS["chat"]},
}
"""Every field that a body may have."""


@dataclass(frozen=True, slots=True)
class BodyRequest:
    """What a body asks for."""

    kind: Kind
    model: str
    prompts: tuple[Prompt, ...]
    """More than one only of a completion that may have them."""
    params: SamplingParams
    chat: ChatForm | None = None
    """Of a chat: what its answers hold."""
    num_asked: int | None = None
    """max_tokens, where the body gives it."""
    length_field: str = "max_tokens"
    """The name under which it is given."""
    form_field: str | None = None
    """Of the field that asks for a form of the text."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with a chunk of the usage."""

    @property
    def prompt(self) -> Prompt:
        """The only one."""
        (prompt,) = self.prompts
        return prompt


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
    may_be_many: bool = False,
) -> BodyRequest:
    """Check a body. defaults: for temperature, max_tokens, top_p and top_k that are not given.
    may_stream: whether the answer can come in pieces. may_be_many: whether a completion can have
    several prompts.

    Raises RequestError, BodyError where a field is to blame.
    """
    if not isinstance(body, dict):
        raise BodyError(f"body must be an object, got {kind_name(body)}", "body")
    fields = {name: value for name, value in body.items() if value is not None}
    check_names(body, FIELDS[kind])
    check_inert(fields, INERT)
    for name in _LABELS[kind]:
        check_label(fields, name)
    stream, include_usage = _read_stream(fields, may_stream=may_stream)
    chat: ChatForm | None = None
    prompts: tuple[Prompt, ...]
    if kind == "completion":
        prompts = _read_prompts(fields, may_be_many=may_be_many)
    else:
        ids, chat = read_chat(fields, tokenizer)
        prompts = (ids,)
        fields |= _fields_of_form(chat, fields)
    form = _read_form(fields, chat, tokenizer)
    params = _read_params(kind, fields, form, defaults)
    length = next((name for name in _LENGTHS if name in fields), "max_tokens")
    return BodyRequest(
        kind,
        fields.get("model", ""),
        prompts,
        params,
        chat=chat,
        num_asked=fields.get(length),
        length_field=length,
        form_field="tools" if isinstance(form, CallsParams) else _form_field(fields),
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
    kind: Kind,
    fields: Mapping[str, Json],
    form: StructuredOutputsParams | CallsParams | None,
    defaults: SamplingSection,
) -> SamplingParams:
    given = {name: fields[name] for name in _SAMPLING if name in fields}
    lengths = [name for name in _LENGTHS if name in fields]
    if len(lengths) == 2:
        raise BodyError("max_tokens and max_completion_tokens are both given", lengths[0])
    if lengths:
        given["max_tokens"] = fields[lengths[0]]
    try:
        given["logprobs"] = num_logprobs(kind, fields)
    except RequestError as error:
        raise sampling_error(error, _LOGPROBS, {}) from None
    given["structured_outputs"] = form
    spelled = {"max_tokens": lengths[0]} if lengths else {}
    return make_params(given, defaults, ("max_tokens", *_SAMPLING, *_LOGPROBS), spelled)


def _read_form(
    fields: Mapping[str, Json], chat: ChatForm | None, tokenizer: Tokenizer
) -> StructuredOutputsParams | CallsParams | None:
    """What the text is held to; behind its reasoning, where it has some."""
    if chat is not None and chat.grammar is not None:
        return chat.grammar
    try:
        form = read_form(fields)
        if form is None or chat is None or not chat.is_thinking:
            return form
        return behind_thinking(form, tokenizer)
    except RequestError as error:
        raise sampling_error(error, FORM_FIELDS, {}) from None


def behind_thinking(form: StructuredOutputsParams, tokenizer: Tokenizer) -> StructuredOutputsParams:
    """A form of the text that follows the reasoning. Raises RequestError where the request says
    itself where it begins, or no token ends reasoning."""
    if form.trigger_token_ids:
        raise RequestError("structured_outputs.trigger_token_ids has no place beside thinking")
    return replace(form, trigger_token_ids=(thinking_end(tokenizer),))


def _form_field(fields: Mapping[str, Json]) -> str | None:
    return next((name for name in FORM_FIELDS if name in fields), None)


def _read_prompts(fields: Mapping[str, Json], *, may_be_many: bool) -> tuple[Prompt, ...]:
    prompt: Json = fields.get("prompt")
    if prompt == "" or (isinstance(prompt, list) and "" in prompt):
        raise BodyError("the prompt is empty; it needs at least 1 character", "prompt")
    if _is_prompt(prompt):
        return (prompt,)
    if may_be_many and isinstance(prompt, list) and prompt and all(map(_is_prompt, prompt)):
        return tuple(prompt)
    message = "prompt must be a string or a list of token ids"
    more = ", or a list of either" if may_be_many else "; one prompt a request"
    raise BodyError(message + more, "prompt")


def _is_prompt(value: Json) -> bool:
    # A bool is an int to Python.
    is_ids = isinstance(value, list) and value and all(type(item) is int for item in value)
    return isinstance(value, str) or bool(is_ids)


def _read_stream(fields: Mapping[str, Json], *, may_stream: bool) -> tuple[bool, bool]:
    """Whether the answer comes in pieces, and with a chunk of its usage at the end."""
    stream, options = fields.get("stream", False), fields.get("stream_options")
    if not isinstance(stream, bool):
        raise BodyError(f"stream must be true or false, got {shown(stream)}", "stream")
    if stream and not may_stream:
        raise BodyError("stream is not supported, got True; it can only be False", "stream")
    if options is None:
        return stream, False
    if not stream:
        raise BodyError("stream_options is given, but stream is not true", "stream_options")
    if not isinstance(options, dict):
        raise BodyError(f"stream_options must be an object, got {kind_name(options)}", _OPTIONS)
    for name, value in options.items():
        if name not in _STREAM_OPTIONS:
            raise BodyError(str(unknown_field(name, _STREAM_OPTIONS, _OPTIONS)), _OPTIONS)
        if value is not None and not isinstance(value, bool):
            raise BodyError(f"stream_options.{name} must be true or false", _OPTIONS)
    if options.get("include_obfuscation"):
        raise BodyError("stream_options.include_obfuscation is not supported", _OPTIONS)
    return stream, bool(options.get("include_usage"))


def _fields_of_form(chat: ChatForm, fields: Mapping[str, Json]) -> dict[str, Json]:
    """Sampling fields that follow from what a chat's answers hold."""
    if not chat.is_parsed:
        return {}
    what = "tools" if chat.has_tools else "thinking"
    if "skip_special_tokens" in fields:
        name = "skip_special_tokens"
        raise BodyError(f"{name} has no meaning beside {what}, whose marks are special", name)
    for name in FORM_FIELDS if chat.has_tools else ():
        is_free = name == "response_format" and fields.get(name) == {"type": "text"}
        if name in fields and not is_free:
            raise BodyError(f"{name} beside {what} is not supported", name)
    return {"skip_special_tokens": False}
