"""The body of an Anthropic message request.

Owns the tables of its fields and what each means here. Every field is honoured, or asks for what
happens anyway, or is refused by name; none is dropped. Messages, tools and the events of the answer
have files of their own. Data flow: body -> ServedRequest, or the ids of a prompt that is counted.
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
    check_names,
    check_object,
    kind_name,
    read_bool,
    read_text,
    shown,
)
from decodegrid.engine.conversations import ChatForm, convert, thinking_end
from decodegrid.engine.grammar_calls import CallsParams
from decodegrid.engine.grammar_params import StructuredOutputsParams
from decodegrid.engine.messages_content import check_cache, read_messages, read_system
from decodegrid.engine.messages_events import MessagesWriter
from decodegrid.engine.messages_tools import read_tools, read_use
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_body import EXTRAS, make_params
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.server_request import ServedRequest
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.tool_use import calls_grammar, recipe_choice

Json = Any
"""What json.loads makes."""

INERT: Final[Mapping[str, tuple[Json, ...]]] = {
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
"""Fields that must ask for what happens anyway: null, or one of these values."""
SAMPLING: Final = ("temperature", "top_p", *EXTRAS)
_PROMPT: Final = (
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"),
    *("cache_control", "speed"),
)
COUNT_FIELDS: Final = _PROMPT
"""Every field that a body whose tokens are counted may have."""
FIELDS: Final = (
    *(*_PROMPT, "max_tokens", "stop_sequences", "stream", "metadata", "service_tier"),
    *SAMPLING,
)
"""Every field that a body may have."""
MAX_BUDGET: Final = 2**31 - 1
"""Largest thinking.budget_tokens."""
EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_CHOICES: Final = {"none": "none", "auto": "auto", "required": "any"}
"""Anthropic's words for the recipe's."""
_FORMAT: Final = "output_config.format"


def read_message(
    body: Json, model: str, tokenizer: Tokenizer, sampling: SamplingSection
) -> ServedRequest:
    """A checked body. model: the name that answers have. sampling: for what is not given.

    Raises RequestError, BodyError where a field is to blame.
    """
    fields = _read_fields(body, FIELDS)
    metadata = fields.get("metadata", {})
    check_object("metadata", metadata, ("user_id",))
    if metadata.get("user_id") is not None:
        read_text("metadata.user_id", metadata["user_id"])
    ids, form = _read_conversation(fields, tokenizer)
    text = _read_form(fields, form, tokenizer)
    params = _read_params(fields, form, text, sampling)
    return ServedRequest(
        kind="message",
        model=model,
        prompts=[ids],
        params=params,
        write=lambda name, created: MessagesWriter(
            form, model, answer_id(name), created, tokenizer, len(ids)
        ),
        answer_id=answer_id,
        source="messages",
        stream=read_bool("stream", fields.get("stream", False)),
        num_asked=fields.get("max_tokens"),
        form_field="tools" if form.grammar is not None else _FORMAT if text is not None else None,
    )


def count_message(body: Json, tokenizer: Tokenizer) -> int:
    """Tokens of the prompt that a body would have. Raises BodyError."""
    fields = _read_fields(body, COUNT_FIELDS)
    ids, form = _read_conversation(fields, tokenizer)
    _read_form(fields, form, tokenizer)
    return len(ids)


def answer_id(name: str) -> str:
    """The `id` of an answer."""
    return f"msg_{name}"


def _read_fields(body: Json, known: tuple[str, ...]) -> dict[str, Json]:
    if not isinstance(body, dict):
        raise BodyError(f"body must be an object, got {kind_name(body)}", "body")
    check_names(body, known)
    fields = {name: value for name, value in body.items() if value is not None}
    check_inert(fields, INERT)
    check_cache("", fields)
    return fields


def _read_conversation(
    fields: Mapping[str, Json], tokenizer: Tokenizer
) -> tuple[list[int], ChatForm]:
    body: dict[str, Json] = {"messages": read_messages(fields.get("messages")), "max_tokens": 1}
    if "system" in fields:
        body["system"] = read_system(fields["system"])
    shapes, tools = read_tools(fields.get("tools", []))
    if shapes:
        body["tools"] = shapes
    use = read_use(fields.get("tool_choice", {"type": "auto"}), tools)
    is_thinking, budget = _read_thinking(fields)
    if shapes:
        choice = recipe_choice(use, is_thinking=is_thinking)
        body["tool_choice"] = {"type": _CHOICES[choice]}
    body["thinking"] = {"type": "enabled" if is_thinking else "disabled"}
    effort = _read_config(fields).get("effort")
    if effort is not None:
        if effort not in EFFORTS:
            name = "output_config.effort"
            what = f"must be one of {', '.join(EFFORTS)}, got {shown(effort)}"
            raise BodyError(f"{name} {what}", name)
        if not is_thinking:
            name = "output_config.effort"
            raise BodyError(f"{name} is of the reasoning, and thinking is not asked for", name)
        body["output_config"] = {"effort": effort}
    request = convert(recipe.MessagesRequest, body, "messages")
    grammar = calls_grammar(
        tools,
        use,
        thinking_end_id=thinking_end(tokenizer) if is_thinking else None,
        is_open=request.parsing_options.starts_in_tool_calls,
        max_thinking_tokens=budget,
    )
    has_tools = bool(tools) and use.mode != "none"
    form = ChatForm(request, has_tools=has_tools, is_thinking=is_thinking, grammar=grammar)
    return tokenizer.encode_conversation(request.conversation), form


def _read_thinking(fields: Mapping[str, Json]) -> tuple[bool, int | None]:
    """Whether the answer begins with reasoning, and the tokens of it at most; None for no limit
    that the output's own does not keep."""
    thinking = fields.get("thinking", {"type": "disabled"})
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        message = (
            f"thinking must have the type enabled, disabled or adaptive, got {shown(thinking)}"
        )
        raise BodyError(message, "thinking")
    check_object("thinking", thinking, ("type", *(("budget_tokens",) if kind == "enabled" else ())))
    budget = thinking.get("budget_tokens")
    if budget is None:
        return kind != "disabled", None
    name = "thinking.budget_tokens"
    if not isinstance(budget, int) or isinstance(budget, bool) or not 1 <= budget <= MAX_BUDGET:
        message = f"{name} must be an integer of 1 to {MAX_BUDGET}, got {shown(budget)}"
        raise BodyError(message, name)
    most = fields.get("max_tokens")
    return True, None if isinstance(most, int) and budget >= most else budget


def _read_config(fields: Mapping[str, Json]) -> Mapping[str, Json]:
    config: Json = fields.get("output_config", {})
    check_object("output_config", config, ("effort", "format"))
    found: Mapping[str, Json] = config
    return found


def _read_form(
    fields: Mapping[str, Json], form: ChatForm, tokenizer: Tokenizer
) -> StructuredOutputsParams | None:
    """What output_config.format asks for; None for free text."""
    given = _read_config(fields).get("format")
    if given is None:
        return None
    if form.has_tools:
        raise BodyError(f"{_FORMAT} beside tools is not supported", _FORMAT)
    if form.grammar is not None:
        message = f"{_FORMAT} beside thinking.budget_tokens below max_tokens is not supported"
        raise BodyError(message, _FORMAT)
    check_object(_FORMAT, given, ("type", "schema"))
    if given.get("type") != "json_schema":
        raise BodyError(f"{_FORMAT}.type must be json_schema", f"{_FORMAT}.type")
    shape = {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}
    try:
        found = read_form({"response_format": shape})
        return found if found is None or not form.is_thinking else behind_thinking(found, tokenizer)
    except RequestError as error:
        message = str(error).replace("response_format.json_schema", _FORMAT)
        raise BodyError(message.replace("response_format", _FORMAT), _FORMAT) from None


def _read_params(
    fields: Mapping[str, Json],
    form: ChatForm,
    text: StructuredOutputsParams | None,
    sampling: SamplingSection,
) -> SamplingParams:
    given = {name: fields[name] for name in (*SAMPLING, "max_tokens") if name in fields}
    if "stop_sequences" in fields:
        given["stop"] = fields["stop_sequences"]
        if not isinstance(given["stop"], list):
            what = kind_name(given["stop"])
            raise BodyError(f"stop_sequences must be a list, got {what}", "stop_sequences")
    wanted: CallsParams | StructuredOutputsParams | None = form.grammar or text
    given["structured_outputs"] = wanted
    given["skip_special_tokens"] = not form.is_parsed
    names = ("max_tokens", *SAMPLING, "stop")
    return make_params(given, sampling, names, {"stop": "stop_sequences"})
