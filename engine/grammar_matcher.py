"""One request's place in the grammar that its text follows.

Owns the matcher of one completion: what was committed, what may come next, and why it failed.
Knows no tensor, no slot and no library (the compiler makes the matcher). Data flow: the queue
begins it, committed ids move it on (advance), and before each step it writes the masks of the
tokens that the step may choose (fill), drafts included, which leave no trace in it.

A draft that the grammar forbids ends the row's masks: the target cannot choose it, so nothing
behind it is ever read. Masks are left open where nothing is to be enforced: before the trigger,
behind the end of the text, and where the grammar allows no token at all; what is chosen there is
dropped or refused when it is committed.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from decodegrid.engine.grammar_calls import CallsParams
from decodegrid.engine.grammar_params import GrammarSource, StructuredOutputsParams
from decodegrid.engine.runner_protocol import MASK_WORD_BITS

ALLOW_ALL = -1
"""A mask word with every bit set."""


class TokenVerdict(Enum):
    """What a committed token means to the grammar."""

    OPEN = "open"
    """More may follow."""
    COMPLETE = "complete"
    """The text is complete with it, and nothing but its end could follow."""
    REFUSED = "refused"
    """It does not continue the text; the request cannot go on."""


class Matcher(Protocol):
    """What is needed of xgrammar's GrammarMatcher."""

    def accept_token(self, token_id: int) -> bool: ...

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool: ...

    def rollback(self, num_tokens: int = 1) -> None: ...

    def is_terminated(self) -> bool: ...

    def is_completed(self) -> bool: ...


class RequestGrammar:
    """A grammar that is waited for (begin), then followed, or that has failed."""

    __slots__ = (
        "_eos_token_id",
        "_matcher",
        "_params",
        "_progress",
        "_scratch",
        "_trigger",
        "failure",
    )

    def __init__(self, params: StructuredOutputsParams | CallsParams, eos_token_id: int) -> None:
        self._params = params
        self._eos_token_id = eos_token_id
        self._trigger = _Trigger(params.trigger_token_ids)
        self._progress = 0
        """Leading ids of the trigger that the text ends with; all of them from then on."""
        self._matcher: Matcher | None = None
        self._scratch = np.zeros((1, 0), dtype=np.int32)
        self.failure: str | None = None
        """Why the request cannot go on."""

    @property
    def source(self) -> GrammarSource:
        return self._params.source

    @property
    def has_begun(self) -> bool:
        """Whether the grammar is there."""
        return self._matcher is not None

    def sibling(self) -> "RequestGrammar":
        """The same grammar for another completion, at its start."""
        return RequestGrammar(self._params, self._eos_token_id)

    def begin(self, matcher: Matcher, num_words: int, token_ids: Sequence[int] = ()) -> None:
        """Follow a fresh matcher from now on. num_words: of a mask row. token_ids: output that was
        committed elsewhere and has to fit; where it does not, `failure` says so."""
        self._matcher = matcher
        self._scratch = np.zeros((1, num_words), dtype=np.int32)
        for token_id in token_ids:
            if self.advance(token_id) is TokenVerdict.REFUSED:
                return

    def advance(self, token_id: int) -> TokenVerdict:
        """Take one committed id."""
        matcher = self._matcher
        assert matcher is not None, "a token is committed before the grammar is there"
        if self.failure is not None:
            return TokenVerdict.REFUSED
        if not self._trigger.is_complete(self._progress):
            self._progress = self._trigger.step(self._progress, token_id)
            return TokenVerdict.OPEN
        try:
            if not matcher.accept_token(token_id):
                self.failure = f"the grammar allows no token here; token {token_id} came"
                return TokenVerdict.REFUSED
            if matcher.is_terminated() or (matcher.is_completed() and self._nothing_follows()):
                return TokenVerdict.COMPLETE
        except RuntimeError as error:
            self.failure = f"the grammar failed: {error}"
            return TokenVerdict.REFUSED
        return TokenVerdict.OPEN

    def allows_nothing(self) -> bool:
        """Whether a grammar that has begun has no text at all; its first mask is empty."""
        matcher = self._matcher
        assert matcher is not None
        if matcher.is_terminated() or matcher.is_completed():
            return False
        matcher.fill_next_token_bitmask(self._scratch, 0)
        return not self._scratch.any()

    def fill(self, masks: NDArray[np.int32], drafts: NDArray[np.int64] | None) -> None:
        """Write the masks of one row.

        masks: (K + 1, words), all bits set, for the token behind the committed text and behind each
        draft. drafts: (K,) ids that the step feeds; None for none. A failure of the grammar leaves
        the rest open and sets `failure`.
        """
        matcher = self._matcher
        assert matcher is not None, "a step runs before the grammar is there"
        if self.failure is not None:
            return
        draft_ids: list[int] = [] if drafts is None else drafts.tolist()
        num_accepted = 0
        progress = self._progress
        try:
            for place in range(len(draft_ids) + 1):
                draft = draft_ids[place] if place < len(draft_ids) else None
                if not self._trigger.is_complete(progress):
                    if draft is not None:
                        progress = self._trigger.step(progress, draft)
                    continue
                if matcher.is_terminated() or not self._fill_row(matcher, masks[place]):
                    break
                # Asked of the mask: the library writes a line to standard error where it refuses.
                if draft is None or not _allows(masks[place], draft):
                    break
                if not matcher.accept_token(draft):
                    break
                num_accepted += 1
            if num_accepted:
                matcher.rollback(num_accepted)
        except RuntimeError as error:
            self.failure = f"the grammar failed: {error}"

    def _fill_row(self, matcher: Matcher, row: NDArray[np.int32]) -> bool:
        """Write one mask; False, and an open one, where no token is allowed."""
        matcher.fill_next_token_bitmask(row.reshape(1, -1), 0)
        if row.any():
            return True
        row.fill(ALLOW_ALL)
        return False

    def _nothing_follows(self) -> bool:
        """Whether a complete text can only end."""
        assert self._matcher is not None
        self._matcher.fill_next_token_bitmask(self._scratch, 0)
        row = self._scratch[0]
        word, bit = divmod(self._eos_token_id, MASK_WORD_BITS)
        row[word] &= np.int32(~(1 << bit)) if bit < MASK_WORD_BITS - 1 else np.int32(2**31 - 1)
        return not row.any()


class _Trigger:
    """Finds a sequence of ids. Source: string matching after Knuth, Morris and Pratt."""

    __slots__ = ("_fallback", "_ids")

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = tuple(ids)
        self._fallback = [0] * len(self._ids)
        length = 0
        for index in range(1, len(self._ids)):
            length = self.step(length, self._ids[index])
            self._fallback[index] = length

    def is_complete(self, progress: int) -> bool:
        return progress == len(self._ids)

    def step(self, progress: int, token_id: int) -> int:
        """Ids of the sequence that the text ends with, one id later."""
        while progress and self._ids[progress] != token_id:
            progress = self._fallback[progress - 1]
        return progress + (self._ids[progress] == token_id)


def _allows(row: NDArray[np.int32], token_id: int) -> bool:
    word, bit = divmod(token_id, MASK_WORD_BITS)
    return 0 <= word < len(row) and bool((int(row[word]) >> bit) & 1)
