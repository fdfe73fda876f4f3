"""The text of one answer on its way into deepseek-recipe's parser.

Owns what the parser is given and when: text without the end of text, and the finish, once. Counts
the tokens of the reasoning. Knows no protocol; the generator of the protocol's chunks comes from
outside. Data flow: pieces of a completion, special tokens spelled -> chunks of the recipe.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import deepseek_recipe as recipe

from decodegrid.engine.conversations import ChatForm
from decodegrid.engine.request_output import FinishReason
from decodegrid.engine.tokenizer import Tokenizer


class Chunk(Protocol):
    """What the recipe makes, in any protocol."""

    def to_json(self) -> str: ...


class AnswerFeed:
    """The parser of one completion, which takes its pieces in order."""

    def __init__(
        self,
        generator: Any,
        form: ChatForm,
        tokenizer: Tokenizer,
        usage: recipe.PromptUsage | None = None,
    ) -> None:
        """generator: the recipe's, of the protocol's chunks. usage: of the prompt, for protocols
        whose first chunk has it."""
        self._processor = recipe.StreamProcessor(generator, form.request.parsing_options, None)
        self._first = self._processor.push(recipe.InferenceChunk.ready(prompt_usage=usage))
        self._eos_id = tokenizer.eos_token_id
        self._eos_text = tokenizer.spelled_bytes(self._eos_id).decode()
        self._thinking_end = tokenizer.thinking_end_id
        self._is_reasoning = form.is_thinking
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        """Tokens up to the end of the reasoning, with its mark."""

    def push(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> list[Chunk]:
        """The chunks that a piece brings; finish_reason: with the last one."""
        self._count(token_ids)
        is_eos = finish_reason == "stop" and stop_reason is None
        if is_eos and token_ids and token_ids[-1] == self._eos_id:
            text = text.removesuffix(self._eos_text)
        chunks, self._first = self._first, []
        if text and not self._processor.finished:
            chunks += self._processor.push(recipe.InferenceChunk.text(text))
        if finish_reason is not None and not self._processor.finished:
            reasons = recipe.InferenceFinishReason
            reason = reasons.Length if finish_reason == "length" else reasons.Stop
            chunks += self._processor.push(recipe.InferenceChunk.finish(reason))
        return list(chunks)

    def _count(self, token_ids: Sequence[int]) -> None:
        self.num_tokens += len(token_ids)
        if not self._is_reasoning:
            return
        ids = list(token_ids)
        if self._thinking_end in ids:
            self._is_reasoning = False
            self.num_reasoning_tokens += ids.index(self._thinking_end) + 1
        else:
            self.num_reasoning_tokens += len(ids)
