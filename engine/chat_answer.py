"""An answer's text taken apart into reasoning, words and tool calls.

Owns the parts of one answer and their finish reason; what the marks between them look like is
deepseek-recipe's. Data flow: the text of a completion with its special tokens spelled, in pieces ->
deltas as OpenAI's streams have them -> the whole message.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import deepseek_recipe as recipe

from decodegrid.engine.answer_feed import AnswerFeed, Chunk
from decodegrid.engine.conversations import ChatForm
from decodegrid.engine.request_output import CompletionOutput, FinishReason
from decodegrid.engine.tokenizer import Tokenizer

Json = Any
"""What json.dumps takes."""

_TOOL_CALLS: Final = "tool_calls"


@dataclass(slots=True)
class AnswerParts:
    """What the deltas of an answer come to."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Json]] = field(default_factory=list)

    def add(self, delta: dict[str, Json]) -> None:
        """Take in a delta of AnswerParser."""
        self.content.append(delta.get("content", ""))
        self.reasoning.append(delta.get("reasoning_content", ""))
        for call in delta.get(_TOOL_CALLS, ()):
            if call["index"] == len(self.tool_calls):
                known = {"name": "", "arguments": ""}
                self.tool_calls.append({"id": call["id"], "type": "function", "function": known})
            known = self.tool_calls[call["index"]]["function"]
            for name in known:
                known[name] += call["function"].get(name, "")


class AnswerParser:
    """The parser of one completion, which takes its pieces in order."""

    def __init__(self, form: ChatForm, tokenizer: Tokenizer) -> None:
        generator = recipe.ChatCompletionRequest.chunk_generator(form.request, "", "")
        self._feed = AnswerFeed(generator, form, tokenizer)
        self._has_tool_calls = False

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens up to the end of the reasoning, with its mark."""
        return self._feed.num_reasoning_tokens

    def push(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> list[dict[str, Json]]:
        """The deltas that a piece brings; finish_reason: with the last one."""
        chunks = self._feed.push(text, token_ids, finish_reason, stop_reason)
        return [delta for chunk in chunks if (delta := self._delta(chunk))]

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """The reason with what the answer holds in mind: a whole one with calls asks for them."""
        return _TOOL_CALLS if reason == "stop" and self._has_tool_calls else reason

    def _delta(self, chunk: Chunk) -> dict[str, Json]:
        (choice,) = json.loads(chunk.to_json())["choices"]
        delta: dict[str, Json] = {
            name: value for name, value in choice["delta"].items() if value and name != "role"
        }
        self._has_tool_calls |= _TOOL_CALLS in delta
        return delta


def read_answer(
    form: ChatForm, completion: CompletionOutput, tokenizer: Tokenizer
) -> tuple[dict[str, Json], str | None, int]:
    """The message of a whole completion, its finish reason, and its tokens of reasoning."""
    parser, parts = AnswerParser(form, tokenizer), AnswerParts()
    deltas = parser.push(
        completion.text, completion.token_ids, completion.finish_reason, completion.stop_reason
    )
    for delta in deltas:
        parts.add(delta)
    content = "".join(parts.content)
    message: dict[str, Json] = {
        "role": "assistant",
        "content": None if parts.tool_calls and not content else content,
    }
    if form.is_thinking:
        message["reasoning_content"] = "".join(parts.reasoning)
    if parts.tool_calls:
        message[_TOOL_CALLS] = parts.tool_calls
    reason = parser.finish_reason(completion.finish_reason)
    return message, reason, parser.num_reasoning_tokens
