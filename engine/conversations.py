"""A conversation as deepseek-recipe has it, and what stands in the text of an answer to it.

Owns the way into the recipe, which knows the frame of the prompt, the marks of an answer and the
rules between turns (each tool call has its result). Its own errors become errors of a field here.
Data flow: a checked body of one protocol -> the recipe's request -> token ids, and a ChatForm.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import deepseek_recipe as recipe

from decodegrid.engine.body_fields import BodyError
from decodegrid.engine.grammar_calls import CallsParams
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.tokenizer import Tokenizer

Json = Any
"""What json.loads makes."""

MODEL: Final = "decodegrid"
"""A name for the recipe, which looks it up to choose the frame."""


@dataclass(frozen=True, slots=True)
class ChatForm:
    """What stands in the text of an answer."""

    request: recipe.ConversationRequest
    """The recipe's record of the conversation."""
    has_tools: bool
    is_thinking: bool
    grammar: CallsParams | None = None
    """What the text is held to, where tools must be called or have strict arguments."""

    @property
    def is_parsed(self) -> bool:
        """Whether the text holds more than the answer's words: reasoning or tool calls."""
        return self.has_tools or self.is_thinking


class _Convertible(Protocol):
    """A request of one of the recipe's protocols."""

    def convert(self, options: recipe.ConversionOptions) -> recipe.ConversationRequest: ...


def convert(
    make: Callable[[dict[str, Json]], _Convertible], body: dict[str, Json], source: str
) -> recipe.ConversationRequest:
    """The recipe's reading of a body, which has only fields that it honours.

    make: the recipe's class of the protocol. source: the field of the conversation, which is to
    blame where the tools are not. Raises BodyError.
    """
    options = recipe.ConversionOptions(
        default_thinking_mode=False,
        responses_web_search=recipe.WebSearchBehavior.Reject,
        messages_web_search=recipe.WebSearchBehavior.Reject,
    ).with_model_alias(MODEL, recipe.ModelVersion.DeepseekV41Flash)
    try:
        return make({"model": MODEL, **body}).convert(options)
    except recipe.ConversionError as error:
        message = str(json.loads(error.body)["error"]["message"])
    except (ValueError, OverflowError) as error:  # what the recipe cannot read at all
        message = str(error)
    raise BodyError(message, _param(message, source))


def thinking_end(tokenizer: Tokenizer) -> int:
    """The token that ends reasoning; raises RequestError where there is none."""
    if tokenizer.thinking_end_id is None:
        raise RequestError("thinking is not supported: the tokenizer has no token that ends it")
    return tokenizer.thinking_end_id


def _param(message: str, source: str) -> str:
    """The field that the recipe's message is about."""
    words = ("tools[", "tools.", "Tool ", "The top level of the function parameters")
    return "tools" if any(word in message for word in words) else source
