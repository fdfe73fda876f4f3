"""An answer's text taken apart into reasoning, words and tool calls.

Owns the parts of one answer and their finish reason; what the marks between them look like is
deepseek-recipe's. Data flow: the text of a completion with its special tokens spelled, in pieces ->
deltas as OpenAI's streams have them -> the whole message.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import deepseek_recipe as recipe

from decodegrid.engine.chat_body import ChatForm
from decodegrid.engine.request_output import CompletionOutput, FinishReason
from decodegrid.engine.tokenizer import Tokenizer

Json = Any
"""What json.dumps takes."""

_TOOL_CALLS: Final = "tool_calls"


class _Chunk(Protocol):
    """A chunk of the recipe."""

    def to_json(self) -> str: ...


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
        self._processor = recipe.StreamProcessor(generator, form.request.parsing_options, None)
        self._processor.push(recipe.InferenceChunk.ready())
        self._eos_id = tokenizer.eos_token_id
        self._eos_text = tokenizer.spelled_bytes(self._eos_id).decode()
        self._thinking_end = tokenizer.thinking_end_id
        self._is_reasoning = form.is_thinking
        self._has_tool_calls = False
        self.num_reasoning_tokens = 0
        """Tokens up to the end of the reasoning, with its mark."""

    def push(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> list[dict[str, Json]]:
        """The deltas that a piece brings; finish_reason: with the last one."""
        self._count(token_ids)
        is_eos = finish_reason == "stop" and stop_reason is None
        if is_eos and token_ids and token_ids[-1] == self._eos_id:
            text = text.removesuffix(self._eos_text)
        chunks = []
        if text and not self._processor.finished:
            chunks += self._processor.push(recipe.InferenceChunk.text(text))
        if finish_reason is not None and not self._processor.finished:
            reasons = recipe.InferenceFinishReason
            reason = reasons.Length if finish_reason == "length" else reasons.Stop
            chunks += self._processor.push(recipe.InferenceChunk.finish(reason))
        return [delta for chunk in chunks if (delta := self._delta(chunk))]

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """The reason with what the answer holds in mind: a whole one with calls asks for them."""
        return _TOOL_CALLS if reason == "stop" and self._has_tool_calls else reason

    def _delta(self, chunk: _Chunk) -> dict[str, Json]:
        (choice,) = json.loads(chunk.to_json())["choices"]
        delta: dict[str, Json] = {
            name: value for name, value in choice["delta"].items() if value and name != "role"
        }
        self._has_tool_calls |= _TOOL_CALLS in delta
        return delta

    def _count(self, token_ids: Sequence[int]) -> None:
        if not self._is_reasoning:
            return
        ids = list(token_ids)
        if self._thinking_end in ids:
            self._is_reasoning = False
            self.num_reasoning_tokens += ids.index(self._thinking_end) + 1
        else:
            self.num_reasoning_tokens += len(ids)


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
