"""The body of an OpenAI response request.

Owns the table of its fields and what each means here. Every field is honoured, or asks for what
happens anyway, or is refused by name; none is dropped. Nothing is kept between requests, so fields
that ask for what was kept are refused. Items of the input and events of the answer have files of
their own. Data flow: body -> ServedRequest.
"""

from collections.abc import Mapping
from typing import Any, Final

import deepseek_recipe as recipe

from decodegrid.configs.sampling_section import SamplingSection
from decodegrid.engine.batch_body import behind_thinking
from decodegrid.engine.batch_form import read_form
from decodegrid.engine.body_fields import (
    BodyError,
    check_inert,
    check_label,
    check_names,
    check_object,
    kind_name,
    read_bool,
    read_text,
    shown,
)
from decodegrid.engine.chat_body import EFFORTS
from decodegrid.engine.chat_tools import TOOL_FIELDS, read_tools, read_use
from decodegrid.engine.conversations import ChatForm, convert, thinking_end
from decodegrid.engine.grammar_calls import CallsParams
from decodegrid.engine.grammar_params import StructuredOutputsParams
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.responses_events import ResponsesWriter
from decodegrid.engine.responses_items import read_input
from decodegrid.engine.sampling_body import EXTRAS, make_params
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.server_request import ServedRequest
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.tool_use import calls_grammar, recipe_choice

Json = Any
"""What json.loads makes."""

INERT: Final[Mapping[str, tuple[Json, ...]]] = {
    "store": (False,),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": ("in_memory",),
}
"""Fields that must ask for what happens anyway: null, or one of these values."""
STATE_FIELDS: Final = ("previous_response_id", "conversation")
"""Ask for what was kept of an earlier request; null at most."""
_KEPT: Final = "nothing is kept between requests; send the earlier items as input"
LABELS: Final = ("user", "safety_identifier", "prompt_cache_key")
"""Say whose request it is; the answer repeats them."""
SAMPLING: Final = ("temperature", "top_p", *EXTRAS, "stop")
FIELDS: Final = (
    *("model", "input", "instructions", "max_output_tokens", "metadata", "reasoning", "text"),
    *("stream", "stream_options"),
    *TOOL_FIELDS,
    *SAMPLING,
    *LABELS,
    *INERT,
    *STATE_FIELDS,
)
"""Every field that a body may have."""
_ECHOED: Final = (
    *("instructions", "max_output_tokens", "metadata", "reasoning", "text", "tools"),
    *("tool_choice", "parallel_tool_calls", "temperature", "top_p"),
    *LABELS,
)
"""Fields that the answer repeats."""
_FORMAT: Final = ("name", "description", "schema", "strict")
_SPELLED: Final = {"max_tokens": "max_output_tokens"}
_VERBOSITY: Final = {"text.verbosity": ("medium", None)}
MAX_METADATA: Final = 16
"""Pairs of `metadata`, as OpenAI has it."""


def read_response(
    body: Json, model: str, tokenizer: Tokenizer, sampling: SamplingSection
) -> ServedRequest:
    """A checked body. model: the name that answers have. sampling: for what is not given.

    Raises RequestError, BodyError where a field is to blame.
    """
    if not isinstance(body, dict):
        raise BodyError(f"body must be an object, got {kind_name(body)}", "body")
    check_names(body, FIELDS)
    fields = {name: value for name, value in body.items() if value is not None}
    for name in STATE_FIELDS:
        if name in fields:
            raise BodyError(f"{name} is not supported: {_KEPT}", name)
    if fields.get("store") is True:
        raise BodyError(f"store=True is not supported: {_KEPT}", "store")
    check_inert(fields, INERT)
    for name in LABELS:
        check_label(fields, name)
    _check_metadata(fields.get("metadata", {}))
    stream = _read_stream(fields)
    ids, form = _read_conversation(fields, tokenizer)
    text = _read_text_form(fields, form, tokenizer)
    params = _read_params(fields, form, text, sampling)
    echo = {name: fields[name] for name in _ECHOED if name in fields}
    echo["text"] = {"format": {"type": "text"}, **fields.get("text", {})}
    echo |= {"temperature": params.temperature, "top_p": params.top_p}
    return ServedRequest(
        kind="response",
        model=model,
        prompts=[ids],
        params=params,
        write=lambda name, created: ResponsesWriter(
            form, echo, model, answer_id(name), created, tokenizer, len(ids)
        ),
        answer_id=answer_id,
        source="input",
        stream=stream,
        num_asked=fields.get("max_output_tokens"),
        length_field="max_output_tokens",
        form_field="tools" if form.grammar is not None else "text" if text is not None else None,
    )


def answer_id(name: str) -> str:
    """The `id` of an answer."""
    return f"resp_{name}"


def _read_conversation(
    fields: Mapping[str, Json], tokenizer: Tokenizer
) -> tuple[list[int], ChatForm]:
    if "input" not in fields:
        raise BodyError("input is needed: a text or a list of items", "input")
    body: dict[str, Json] = {"input": read_input(fields["input"])}
    if "instructions" in fields:
        body["instructions"] = read_text("instructions", fields["instructions"])
    shapes, tools = read_tools(fields.get("tools", []), is_flat=True)
    if shapes:
        body["tools"] = shapes
    use = read_use(fields, tools, is_flat=True)
    effort = _read_effort(fields.get("reasoning", {}))
    is_thinking = effort != "none"
    body["tool_choice"] = recipe_choice(use, is_thinking=is_thinking)
    body["reasoning"] = {"effort": effort}
    request = convert(recipe.ResponsesRequest, body, "input")
    grammar = calls_grammar(
        tools,
        use,
        thinking_end_id=thinking_end(tokenizer) if is_thinking else None,
        is_open=request.parsing_options.starts_in_tool_calls,
    )
    has_tools = bool(tools) and use.mode != "none"
    form = ChatForm(request, has_tools=has_tools, is_thinking=is_thinking, grammar=grammar)
    return tokenizer.encode_conversation(request.conversation), form


def _read_effort(reasoning: Json) -> str:
    """How much reasoning is asked for; "none" where none is."""
    check_object("reasoning", reasoning, ("effort",))
    effort = reasoning.get("effort")
    if effort is None:
        return "none"
    if effort not in EFFORTS:
        raise BodyError(
            f"reasoning.effort must be one of {', '.join(EFFORTS)}, got {shown(effort)}",
            "reasoning.effort",
        )
    return str(effort)


def _read_text_form(
    fields: Mapping[str, Json], form: ChatForm, tokenizer: Tokenizer
) -> StructuredOutputsParams | None:
    """What `text.format` asks for; None for free text."""
    text = fields.get("text", {})
    check_object("text", text, ("format", "verbosity"))
    check_inert({f"text.{name}": item for name, item in text.items()}, _VERBOSITY)
    given = text.get("format")
    if given is None or given == {"type": "text"}:
        return None
    if form.has_tools:
        raise BodyError("text.format beside tools is not supported", "text.format")
    if not isinstance(given, dict):
        raise BodyError(f"text.format must be an object, got {kind_name(given)}", "text.format")
    shape: dict[str, Json] = {"type": given.get("type")}
    if given.get("type") == "json_schema":
        check_object("text.format", given, ("type", *_FORMAT))
        shape["json_schema"] = {name: given[name] for name in _FORMAT if name in given}
    else:
        check_object("text.format", given, ("type",))
    try:
        found = read_form({"response_format": shape})
        return found if found is None or not form.is_thinking else behind_thinking(found, tokenizer)
    except RequestError as error:
        message = str(error).replace("response_format.json_schema", "text.format")
        raise BodyError(message.replace("response_format", "text.format"), "text.format") from None


def _read_params(
    fields: Mapping[str, Json],
    form: ChatForm,
    text: StructuredOutputsParams | None,
    sampling: SamplingSection,
) -> SamplingParams:
    given = {name: fields[name] for name in SAMPLING if name in fields}
    if "max_output_tokens" in fields:
        given["max_tokens"] = fields["max_output_tokens"]
    wanted: CallsParams | StructuredOutputsParams | None = form.grammar or text
    given["structured_outputs"] = wanted
    given["skip_special_tokens"] = not form.is_parsed
    spelled = _SPELLED if "max_output_tokens" in fields else {}
    return make_params(given, sampling, ("max_tokens", *SAMPLING), spelled)


def _read_stream(fields: Mapping[str, Json]) -> bool:
    stream = read_bool("stream", fields.get("stream", False))
    options = fields.get("stream_options")
    if options is None:
        return stream
    if not stream:
        raise BodyError("stream_options is given, but stream is not true", "stream_options")
    check_object("stream_options", options, ("include_obfuscation",))
    given = options.get("include_obfuscation")
    if given is not None and given is not False:
        name = "stream_options.include_obfuscation"
        raise BodyError(f"{name} is not supported", name)
    return stream


def _check_metadata(metadata: Json) -> None:
    """Raise BodyError where it is no object of strings; it is repeated in the answer."""
    if not isinstance(metadata, dict) or len(metadata) > MAX_METADATA:
        message = f"metadata must be an object of at most {MAX_METADATA} strings"
        raise BodyError(message, "metadata")
    for name, value in metadata.items():
        read_text("metadata", name)
        read_text(f"metadata.{name}", value)
