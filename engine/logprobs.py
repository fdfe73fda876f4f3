"""Log-probabilities of a request's tokens, from the arrays of a step to what a caller sees.

Owns the public form (a dictionary for each token, as in vLLM), the choice of what goes into it, and
the lists that grow with a request. Computes no probability: the device gives them, of the model's
logits before penalties, bias, temperature and filters. Data flow: RowLogprobs and
PromptLogprobs in, one dictionary a token out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decodegrid.engine.runner_protocol import PromptLogprobs, StepLogprobs
from decodegrid.engine.tokenizer import IncrementalDetokenizer

TextOf = Callable[[int], str]
"""Text that a token id would add at the place in question."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one place."""

    logprob: float
    """Natural logarithm of its probability; -inf where the model rules it out."""
    rank: int | None
    """1 for the most probable token. None beyond the 20 most probable ones, where the device counts
    no further."""
    decoded_token: str | None
    """Text that the token adds at its place: empty for part of a character and for a special token
    that is skipped, so that the chosen tokens' make up the output's text. None without a tokenizer.
    """


TokenLogprobs = dict[int, Logprob]
"""By token id: the token's own first, then those of the most probable tokens in their order."""


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """One row of a step's logprobs, by emitted token."""

    chosen: NDArray[np.float32]
    """(K + 1,)"""
    top_ids: NDArray[np.int64]
    """(K + 1, MAX_TOP_LOGPROBS)"""
    top_logprobs: NDArray[np.float32]
    """(K + 1, MAX_TOP_LOGPROBS)"""

    @classmethod
    def of(cls, step: StepLogprobs, row: int) -> "RowLogprobs":
        return cls(step.chosen[row], step.top_ids[row], step.top_logprobs[row])


class OutputLogprobs:
    """The logprobs of one completion's tokens, in their order."""

    __slots__ = ("_num_top", "cumulative", "tokens")

    def __init__(self, num_top: int) -> None:
        """num_top: most probable tokens to give beside each token's own, 0 to MAX_TOP_LOGPROBS."""
        self._num_top = num_top
        self.tokens: list[TokenLogprobs] = []
        self.cumulative = 0.0
        """Sum over the completion's tokens."""

    def add(self, token_id: int, row: RowLogprobs, index: int, text_of: TextOf | None) -> None:
        """Take the token that a step emitted at place `index` of a row."""
        chosen = float(row.chosen[index])
        self.cumulative += chosen
        top = (row.top_ids[index], row.top_logprobs[index])
        self.tokens.append(_entry(token_id, chosen, *top, self._num_top, text_of))


class PromptLogprobList:
    """The logprobs of a prompt's tokens, filled chunk by chunk."""

    __slots__ = ("_num_top", "_text", "_token_ids", "tokens")

    def __init__(
        self, token_ids: Sequence[int], num_top: int, text: IncrementalDetokenizer | None = None
    ) -> None:
        """token_ids: the prompt, of one token at least. num_top: as for OutputLogprobs. text: a
        fresh decoder for the prompt's tokens."""
        self._token_ids = tuple(token_ids)
        self._num_top = num_top
        self._text = text
        self.tokens: list[TokenLogprobs | None] = [None]
        """By prompt token so far; None for the first, which nothing stands before."""
        if text is not None:
            text.push(self._token_ids[:1])

    @property
    def is_complete(self) -> bool:
        return len(self.tokens) == len(self._token_ids)

    def following(self, start: int, num_tokens: int) -> Sequence[int] | None:
        """The prompt's ids behind each position of a chunk, for the device to look up.

        None where all of them are known already, as when a request is computed again.
        """
        if self.is_complete or start + num_tokens < len(self.tokens):
            return None
        return self._token_ids[start + 1 : start + num_tokens + 1]

    def add(self, start: int, chunk: PromptLogprobs) -> None:
        """Take the chunk from position `start`; what is known already is passed over."""
        for index, chosen in enumerate(chunk.chosen.tolist()):
            place = start + 1 + index
            if place < len(self.tokens):
                continue
            assert place == len(self.tokens), "a chunk of the prompt was left out"
            token_id = self._token_ids[place]
            text_of = None if self._text is None else self._text.peek
            top = (chunk.top_ids[index], chunk.top_logprobs[index])
            self.tokens.append(_entry(token_id, chosen, *top, self._num_top, text_of))
            if self._text is not None:
                self._text.push((token_id,))


def _entry(
    token_id: int,
    chosen: float,
    top_ids: NDArray[np.int64],
    top_logprobs: NDArray[np.float32],
    num_top: int,
    text_of: TextOf | None,
) -> TokenLogprobs:
    """The dictionary of one token. top_ids: -1 behind the end of a small vocabulary."""

    def logprob(of_id: int, value: float, rank: int | None) -> Logprob:
        return Logprob(value, rank, None if text_of is None else text_of(of_id))

    places = (top_ids == token_id).nonzero()[0]
    found = {token_id: logprob(token_id, chosen, int(places[0]) + 1 if places.size else None)}
    for rank in range(1, num_top + 1):
        of_id = int(top_ids[rank - 1])
        if of_id >= 0 and of_id not in found:
            found[of_id] = logprob(of_id, float(top_logprobs[rank - 1]), rank)
    return found
