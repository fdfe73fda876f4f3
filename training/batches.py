"""Rows of tokens for training and evaluation, as a pure function of stream, seed and step.

Owns the cut of a token stream into rows, and their order. A row starts at a document, or goes on
with a long one that the row before cut. A row's targets are the next tokens; a target that is the
begin-of-sentence token is left out (-100). A mark tells which targets an assistant wrote.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORED = -100


_LEAST_REST = 256
"""A cut document with at least as many tokens left goes on in the next row."""


class Rows:
    """Rows of `length` tokens plus one target, from the start of a document where possible."""

    def __init__(
        self,
        stream: npt.NDArray[np.uint16],
        length: int,
        bos: int,
        seed: int,
        answers: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """`answers`: whether an assistant wrote a token; None: all of them.

        Raises ValueError when the stream does not hold one row, or the marks are not as many.
        """
        if answers is not None and len(answers) != len(stream):
            raise ValueError(f"{len(answers)} marks for a stream of {len(stream)} tokens")
        self.stream, self.length, self.bos, self.answers = stream, length, bos, answers
        documents = np.append(np.flatnonzero(stream == bos), len(stream))
        starts, start = [], int(documents[0])
        while start + length < len(stream):
            starts.append(start)
            end = start + length
            following = int(documents[np.searchsorted(documents, end)])
            start = end if following - end >= _LEAST_REST else following
        if not starts:
            raise ValueError(f"a stream of {len(stream)} tokens has no row of {length + 1}")
        self.starts = np.array(starts)
        self.order = np.random.default_rng(seed).permutation(len(starts))

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Rows number `first` on, wrapping around: ids and targets, (count, length) int64."""
        starts = self._starts_of(first, count)
        rows = np.stack([self.stream[s : s + self.length + 1] for s in starts])
        whole = torch.from_numpy(rows.astype(np.int64))
        targets = whole[:, 1:].clone()
        targets[targets == self.bos] = IGNORED
        return whole[:, :-1].contiguous(), targets

    def answer_targets(self, first: int, count: int) -> Tensor:
        """Of the same rows, whether an assistant wrote the target: (count, length) bool."""
        if self.answers is None:
            return torch.ones(count, self.length, dtype=torch.bool)
        starts = self._starts_of(first, count)
        marks = np.stack([self.answers[s + 1 : s + self.length + 1] for s in starts])
        return torch.from_numpy(marks)

    def _starts_of(self, first: int, count: int) -> npt.NDArray[np.int64]:
        picks = self.order[np.arange(first, first + count) % len(self.order)]
        starts: npt.NDArray[np.int64] = self.starts[picks]
        return starts
