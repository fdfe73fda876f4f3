"""What form a request wants its text to have, checked when it is written down.

Owns the fields, which follow vLLM's, and the one text that they come down to. Compiles nothing and
imports no grammar library. Data flow: StructuredOutputsParams -> GrammarSource, which names the
grammar in the compiler's cache.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from decodegrid.configs.strict_json import load_json
from decodegrid.engine.grammar_regex import check_regex
from decodegrid.engine.grammar_schema import check_schema
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_checks import check_bool, check_token_ids, show
from decodegrid.engine.vllm_fields import FORM_VALUES, UnsupportedForm, check_unsupported

GrammarKind = Literal["json", "regex", "choice", "grammar", "json_object", "calls"]

MAX_CHARACTERS: Final[Mapping[str, int]] = {
    "json": 262144,
    "regex": 16384,
    "choice": 262144,
    "grammar": 262144,
    "calls": 524288,
}
"""Longest text of each kind; the time to compile one grows with its length."""
MAX_TRIGGER_TOKENS: Final = 64
_NAMES: Final = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as text; equal sources have one compiled form."""

    kind: GrammarKind
    text: str
    """JSON schema, regular expression, JSON list of choices, EBNF, or what CallsParams makes; empty
    for json_object."""
    any_whitespace: bool = True
    """For the two JSON kinds: whether whitespace may stand between the parts of a value."""


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams(UnsupportedForm):
    """The form of a request's text: exactly one of the first five fields.

    Every token, accepted drafts included, continues a text of that form; the end of text can only
    come where the text is complete, and where nothing else could follow the request ends without
    it (finish reason "stop"). A request that reaches max_tokens first ends with "length" and an
    incomplete text. Raises RequestError naming the field and what of it is not supported.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as a mapping or as text. Properties and items that it does not name are not
    made, unless it says `additionalProperties` or `items`. Properties come in its order."""
    regex: str | None = None
    """The whole text matches it."""
    choice: Sequence[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """EBNF as xgrammar and llama.cpp read it, with a rule `root`."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """JSON with ", " and ": " between its parts and no other whitespace; otherwise up to 64
    spaces and line ends may stand at each place, which a model may make use of."""
    trigger_token_ids: Sequence[int] = ()
    """The form begins behind these ids, such as the end of thinking; text before them, and theirs,
    is free. Empty: it begins with the first token."""
    source: GrammarSource = field(init=False, repr=False)
    """What the fields come down to."""

    def __post_init__(self) -> None:
        check_unsupported(self, FORM_VALUES, "structured_outputs.")
        check_bool("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)
        check_token_ids("structured_outputs.trigger_token_ids", self.trigger_token_ids)
        if len(self.trigger_token_ids) > MAX_TRIGGER_TOKENS:
            raise RequestError(
                f"structured_outputs.trigger_token_ids has {len(self.trigger_token_ids)} ids; "
                f"at most {MAX_TRIGGER_TOKENS} are allowed"
            )
        if self.json_object is not None:
            check_bool("structured_outputs.json_object", self.json_object)
        given = [name for name in _NAMES if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise RequestError(
                f"structured_outputs must have exactly one of {', '.join(_NAMES)}, got {found}"
            )
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            raise RequestError(
                "structured_outputs.disable_any_whitespace is for json and json_object, "
                f"got it beside {given[0]}"
            )
        object.__setattr__(self, "source", self._make_source(given[0]))

    def _make_source(self, name: str) -> GrammarSource:
        any_whitespace = not self.disable_any_whitespace
        match name:
            case "json":
                return GrammarSource("json", _schema_text(self.json), any_whitespace)
            case "regex":
                text = _text("regex", self.regex)
                check_regex("structured_outputs.regex", text)
                return GrammarSource("regex", text)
            case "choice":
                return GrammarSource("choice", _choice_text(self.choice))
            case "grammar":
                return GrammarSource("grammar", _text("grammar", self.grammar))
            case _:
                return GrammarSource("json_object", "", any_whitespace)


def _text(name: str, value: object) -> str:
    """A text of this kind: a string, Unicode, neither empty nor too long."""
    field_name = f"structured_outputs.{name}"
    if not isinstance(value, str):
        raise RequestError(f"{field_name} must be a string, got {show(value)}")
    if not value:
        raise RequestError(f"{field_name} must not be empty")
    most = MAX_CHARACTERS[name]
    if len(value) > most:
        raise RequestError(f"{field_name} has {len(value)} characters; at most {most} are allowed")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{field_name} is not valid Unicode at character {error.start}"
        ) from None
    return value


def _choice_text(choices: object) -> str:
    name = "structured_outputs.choice"
    if isinstance(choices, (str, bytes)) or not isinstance(choices, Sequence):
        raise RequestError(f"{name} must be a list of strings, got {show(choices)}")
    if not all(isinstance(choice, str) for choice in choices):
        raise RequestError(f"{name} must be a list of strings, got {show(choices)}")
    if not choices or "" in choices:
        raise RequestError(f"{name} must hold strings, and no empty one, got {show(choices)}")
    return _text("choice", json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False))


def _schema_text(schema: object) -> str:
    """A checked schema in one spelling; the order of its properties is kept."""
    name = "structured_outputs.json"
    if isinstance(schema, str):
        _text("json", schema)
        try:
            schema = load_json(schema)
        except ValueError as error:
            raise RequestError(f"{name}: {error}") from None
    if not isinstance(schema, Mapping):
        raise RequestError(f"{name} must be a JSON schema, an object, got {show(schema)}")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {error}") from None
    _text("json", text)
    # What the text says, so that keys that are no strings are looked at in the form they get.
    check_schema(name, json.loads(text))
    return text
