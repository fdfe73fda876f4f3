"""Finds the first stop string in a text that comes piece by piece.

Owns the text that is held back because a stop string may begin in it, and the rule which of
several stop strings counts. Knows no tokens. Data flow: pieces of decoded text go in, text that can
no longer be part of a stop string comes out.

The stop string that is complete first wins; of those that end at the same character, the longest.
So the result depends on the text alone, and not on how it was cut into pieces.
Source: string matching after Knuth, Morris and Pratt.
"""

from collections.abc import Sequence


class _Matcher:
    """How many leading characters of one stop string the text ends with."""

    __slots__ = ("_fallback", "length", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.length = 0
        self._fallback = _fallbacks(pattern)

    def step(self, char: str) -> bool:
        """Take one character; whether the stop string is complete with it."""
        length = self.length
        while length and self.pattern[length] != char:
            length = self._fallback[length - 1]
        if self.pattern[length] == char:
            length += 1
        is_complete = length == len(self.pattern)
        # Where a complete one does not count, the next may begin inside of it.
        self.length = self._fallback[length - 1] if is_complete else length
        return is_complete


class StopStrings:
    """The search over one text; it is over at the first match."""

    __slots__ = ("_held", "_include", "_matchers", "matched")

    def __init__(self, stop_strings: Sequence[str], *, include: bool) -> None:
        """stop_strings: none of them empty. include: the stop string stays at the text's end."""
        self._matchers = [_Matcher(pattern) for pattern in stop_strings]
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str, *, counts: bool = True) -> str:
        """Take the next piece; return what no stop string can begin in.

        After a match that is the rest of the text before it (and the stop string, if it is to be
        included); what stands behind it is dropped, and later pieces are. counts: whether a stop
        string may end in this piece; one that begins in it may end in a later one all the same.
        """
        if self.matched is not None:
            return ""
        whole = self._held + text
        for index in range(len(self._held), len(whole)):
            complete = [m.pattern for m in self._matchers if m.step(whole[index])]
            if complete and counts:
                self.matched = max(complete, key=len)
                self._held = ""
                end = index + 1
                return whole[: end if self._include else end - len(self.matched)]
        num_held = max((matcher.length for matcher in self._matchers), default=0)
        split = len(whole) - num_held
        self._held = whole[split:]
        return whole[:split]

    def flush(self) -> str:
        """What is still held back, at the end of a text without a stop string."""
        held, self._held = self._held, ""
        return held


def _fallbacks(pattern: str) -> list[int]:
    """For each length, the longest shorter prefix that the prefix of that length ends with."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table
