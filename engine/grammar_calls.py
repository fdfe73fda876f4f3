"""What form a request wants its reasoning and its tool calls to have.

Owns the record of it and the one text that it comes down to, which names the grammar in the
compiler's cache. Knows no protocol and no grammar library. Data flow: the tools of a body and how
they may be used -> CallsParams -> GrammarSource.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from decodegrid.engine.grammar_params import MAX_CHARACTERS, GrammarSource
from decodegrid.engine.request_error import RequestError

CallMode = Literal["none", "may", "must", "one"]
"""No calls; calls or not; at least one call; exactly one call."""


@dataclass(frozen=True, slots=True)
class CallSchema:
    """A tool that may be called."""

    name: str
    parameters: Mapping[str, Any] | None
    """The JSON schema that its arguments follow; None for any arguments."""


@dataclass(frozen=True, slots=True)
class CallsParams:
    """The form of an answer in the model's own marks; stands where StructuredOutputsParams does.

    Every token, accepted drafts included, continues a text of that form. Raises RequestError that
    begins with `tools` for schemas that are too long together.
    """

    tools: tuple[CallSchema, ...] = ()
    mode: CallMode = "none"
    is_parallel: bool = True
    """Whether there may be several calls."""
    thinking_end_id: int | None = None
    """The token that ends the reasoning that the text begins with; None for no reasoning."""
    max_thinking_tokens: int | None = None
    """Tokens of the reasoning at most, without its end; None for no limit."""
    is_open: bool = False
    """Whether the prompt ends with the opening of the calls."""
    trigger_token_ids: tuple[int, ...] = ()
    """The form begins with the first token."""
    source: GrammarSource = field(init=False, repr=False)

    def __post_init__(self) -> None:
        text = json.dumps(
            {
                "tools": [
                    {"name": tool.name, "parameters": tool.parameters} for tool in self.tools
                ],
                "mode": self.mode,
                "is_parallel": self.is_parallel,
                "thinking_end_id": self.thinking_end_id,
                "max_thinking_tokens": self.max_thinking_tokens,
                "is_open": self.is_open,
            },
            ensure_ascii=False,
        )
        most = MAX_CHARACTERS["calls"]
        if len(text) > most:
            raise RequestError(
                f"tools have {len(text)} characters of names and schemas; at most {most} are "
                "allowed where calls are held to them"
            )
        object.__setattr__(self, "source", GrammarSource("calls", text))
