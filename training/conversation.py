"""Conversations as plain data.

Owns: the records that the template generators make and the renderer reads. Does not own: wording
(`templates`) or the prompt format (`render`). Data flow: templates -> Conversation -> render ->
text -> token ids.
"""

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call."""

    name: str
    description: str
    parameters_json: str
    """JSON Schema of the arguments, as JSON text (text, so that the record is hashable)."""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of the assistant."""

    name: str
    arguments_json: str
    """A JSON object as text; its key order is the order of the rendered parameters."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. `calls` is for the assistant only; a tool turn answers the call of the turn
    before it."""

    role: Role
    content: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that end with an assistant turn, the tools they may use, and a label for statistics."""

    domain: str
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    json_output: bool = False
    """Whether the prompt asks for the response format `json_object`."""


def user(content: str) -> Turn:
    """A user turn."""
    return Turn("user", content)


def assistant(content: str) -> Turn:
    """An assistant turn of text."""
    return Turn("assistant", content)
