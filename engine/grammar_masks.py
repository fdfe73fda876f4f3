"""The masks of a rich step, from the grammars of its rows.

Owns the array that a step gets. Data flow: the loop commits the step before, and asks here while
the forward of this one runs; each row's grammar writes its part.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from decodegrid.engine.grammar_matcher import ALLOW_ALL
from decodegrid.engine.request import Request
from decodegrid.engine.runner_protocol import num_mask_words


class GrammarMasks:
    """StepMasks over the requests' grammars."""

    def __init__(self, num_draft_tokens: int, vocab_size: int) -> None:
        self._row_shape = (num_draft_tokens + 1, num_mask_words(vocab_size))

    def fill(
        self, requests: Sequence[Request], drafts: Sequence[NDArray[np.int64] | None]
    ) -> NDArray[np.int32] | None:
        """See StepMasks. None where no row has a grammar that goes on."""
        masks: NDArray[np.int32] | None = None
        for row, request in enumerate(requests):
            # A row that has ended, or went back to the queue, is dropped whatever it chooses.
            if request.grammar is None or request.is_finished:
                continue
            if masks is None:
                masks = np.full((len(requests), *self._row_shape), ALLOW_ALL, dtype=np.int32)
            request.grammar.fill(masks[row], drafts[row])
        return masks
