"""What the request side needs from a device, and nothing of how the device does it.

Owns the types that cross between the scheduler's loop and the runner that holds the model and its
captured grid. Owns no state. The loop hands a runner chunks of prompt, slot rows and lists of
slots; it gets back the tokens that a decode step emitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from decodegrid.capture.grid import GraphKey

MAX_STOP_TOKEN_IDS = 8
"""Stop token ids (end of text included) that one slot row holds."""

HISTORY_LEN = 3
"""Tokens before a position that the device is given; -1 stands before the start of the text."""


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """What the device has to know of a request when its decoding starts.

    With committed length L (prompt and emitted tokens), L - 1 tokens have been prefilled.
    """

    last_token: int
    """The certain token at position seq_len - 1, which the first decode step feeds."""
    seq_len: int
    """Committed length L."""
    history: tuple[int, int, int]
    """Token ids at positions L-4, L-3, L-2; -1 before the start."""
    max_seq_len: int
    """Length at which the request ends; a step emits at most max_seq_len - L tokens for it."""
    temperature: float
    """0 is greedy."""
    seed: int
    """0 to 2**63 - 1."""
    stop_token_ids: tuple[int, ...]
    """At most MAX_STOP_TOKEN_IDS, each inside the vocabulary."""
    top_p: float = 1.0
    """Above 0; 1 keeps every token."""
    top_k: int = -1
    """At least 1; -1 keeps every token."""
    max_drafts: int | None = None
    """Drafts that a step may verify for it, at least 0; None for as many as there are."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one decode step did, rows in the order of the slots given."""

    token_ids: NDArray[np.int64]
    """(num_rows, K + 1) emitted token ids, row i valid up to num_emitted[i]."""
    num_emitted: NDArray[np.int64]
    """(num_rows,) accepted drafts + 1."""
    num_verified: NDArray[np.int64]
    """(num_rows,) drafts verified, which is the row's query tokens - 1."""
    confidence: NDArray[np.float32]
    """(num_rows, K) probability of each new draft, if the ones before it are accepted."""
    num_query_tokens: int
    """Query tokens really used, pads not counted."""
    key: GraphKey
    """The captured pair that ran: rows and query tokens, pads included."""


class StepRunner(Protocol):
    """A device with max_num_reqs slots (1..max_num_reqs) and num_blocks blocks (0 is the null one).

    A slot's life: prefill calls in position order, start, then decode and set_blocks, then stop.
    stop may also come before start. Slot 0 and block 0 are never handed out.
    """

    num_draft_tokens: int
    max_num_reqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    prefill_chunk_sizes: tuple[int, ...]
    vocab_size: int
    start_up_report: str
    """The phases of start-up as a table, empty where nothing was measured."""

    @property
    def num_compilations(self) -> int:
        """Compilations made so far; still after ready."""
        ...

    @property
    def num_captured(self) -> int:
        """Captured graphs; still after ready."""
        ...

    def prefill(
        self,
        slot: int,
        token_ids: Sequence[int],
        start: int,
        history: tuple[int, int, int],
        block_ids: Sequence[int],
    ) -> None:
        """Compute the state of positions start .. start + len(token_ids) - 1 of a slot.

        token_ids: 1 to prefill_chunk_sizes[-1] ids. history: ids at start-3, start-2, start-1.
        block_ids: the slot's block table, covering at least every position written.
        start == 0 begins a new text: whatever the slot held before is gone.
        """

    def start(self, slot: int, request: SlotRequest, block_ids: Sequence[int]) -> None:
        """Write the slot row; the slot's next decode step verifies no draft."""

    def set_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        """Replace a started slot's block table; the old table is a prefix of the new one."""

    def stop(self, slot: int) -> None:
        """Forget a slot; it and its blocks may be given to another request at once."""

    def decode(self, slots: Sequence[int], num_query_tokens: int) -> StepResult:
        """Run one step over started slots.

        num_query_tokens: total wanted, len(slots) .. len(slots) * (K + 1). Block tables cover
        min(L + K + 1, max_seq_len) positions of every row.
        """
