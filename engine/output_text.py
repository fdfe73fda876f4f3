"""The text of one completion: decoded token by token, up to its stop string.

Owns the detokenizer and the search for stop strings of one request. Does not decide that a request
ends (the request does, with what is said here). Data flow: ids go in one at a time as they are
committed, text that is certain comes out.
"""

from decodegrid.engine.stop_strings import StopStrings
from decodegrid.engine.tokenizer import IncrementalDetokenizer


class OutputText:
    """See the module. Text is certain when its characters are whole and no stop string can begin
    in it."""

    __slots__ = ("_detokenizer", "_fresh", "_stop", "_taken")

    def __init__(
        self, detokenizer: IncrementalDetokenizer, stop_strings: StopStrings | None = None
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = stop_strings
        self._fresh: list[str] = []
        self._taken: list[str] = []

    @property
    def whole(self) -> str:
        """All text that is certain so far."""
        return "".join([*self._taken, *self._fresh])

    def peek(self, token_id: int) -> str:
        """Text that an id would add if it came next, stop strings not looked for."""
        return self._detokenizer.peek(token_id)

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Take one id; the stop string that its text completed, or None.

        may_stop: whether one that is completed by this id counts."""
        return self._add(self._detokenizer.push((token_id,)), may_stop)

    def finish(self, *, may_stop: bool = True) -> str | None:
        """No more ids: give free what was held back.

        Returns the stop string that is completed by the sign for a character without its end
        (U+FFFD), or None. A second call does nothing.
        """
        matched = self._add(self._detokenizer.flush(), may_stop)
        if self._stop is not None:
            self._fresh.append(self._stop.flush())
        return matched

    def take(self) -> str:
        """Text that became certain since the last call."""
        text = "".join(self._fresh)
        self._fresh.clear()
        self._taken.append(text)
        return text

    def _add(self, text: str, may_stop: bool) -> str | None:
        if self._stop is None:
            self._fresh.append(text)
            return None
        if self._stop.matched is not None:
            return None
        self._fresh.append(self._stop.push(text, counts=may_stop))
        return self._stop.matched
