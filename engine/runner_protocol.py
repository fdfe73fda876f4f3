"""What the request side needs from a device, and nothing of how the device does it.

Owns the types that cross between the scheduler's loop and the runner that holds the model and its
captured grid. Owns no state. The loop hands a runner chunks of prompt, slot rows and lists of
slots; it gets back the tokens that a decode step emitted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from decodegrid.capture.grid import GraphKey, StepVariant

MAX_STOP_TOKEN_IDS = 8
"""Stop token ids (end of text included) that one slot row holds."""

HISTORY_LEN = 3
"""Tokens before a position that the device is given; -1 stands before the start of the text."""

MAX_TOP_LOGPROBS = 20
"""Most probable tokens whose log-probabilities a step returns."""

MASK_WORD_BITS = 32
"""Token ids in one word of a grammar's mask; bit i of word w stands for id 32 * w + i."""


def num_mask_words(vocab_size: int) -> int:
    """Words of a mask row that covers the vocabulary."""
    return -(-vocab_size // MASK_WORD_BITS)


@dataclass(frozen=True, slots=True)
class RichRequest:
    """What only the rich variant of a step does for a request.

    At each verify position the counts are those of the committed output and the drafts before it.
    Adjustments come in this order: logit bias, repetition, frequency and presence penalty, banned
    ids, grammar mask; then temperature, min_p, top_p, top_k. Token ids are inside the vocabulary.
    """

    logit_bias: Mapping[int, float]
    """Added to the logit of a token id; finite."""
    presence_penalty: float
    """Taken from the logit of every id in the output."""
    frequency_penalty: float
    """Taken from an id's logit as often as it is in the output."""
    repetition_penalty: float
    """Above 0; divides positive and multiplies other logits of ids in prompt or output; 1 is off.
    """
    min_seq_len: int
    """Below this committed length (with the drafts before the position) `banned_before` cannot be
    chosen; 0 never bans."""
    banned_before: tuple[int, ...]
    """All stop ids of the request, not only the MAX_STOP_TOKEN_IDS of the slot row."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Committed output so far: empty, or what a preempted request had emitted."""
    num_top_logprobs: int = -1
    """-1 reads no logprobs, 0 those of the emitted tokens, n (at most MAX_TOP_LOGPROBS) the n most
    probable ones too. The step computes all of them for every row of a rich batch."""
    has_grammar: bool = False
    """Its steps may come with masks."""


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
    min_p: float = 0.0
    """0 to 1: tokens below this share of the highest probability are out; 0 keeps every token."""
    rich: RichRequest | None = None
    """Given, every batch with the request runs the rich variant of its pair."""


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-softmax of the target's logits as the model made them: before bias, penalties, masks,
    temperature and filters. Row i is valid up to num_emitted[i]."""

    chosen: NDArray[np.float32]
    """(num_rows, K + 1) of the emitted tokens."""
    top_ids: NDArray[np.int64]
    """(num_rows, K + 1, MAX_TOP_LOGPROBS) most probable ids, descending, the lower id first among
    ties; -1 behind the end of a smaller vocabulary."""
    top_logprobs: NDArray[np.float32]
    """(num_rows, K + 1, MAX_TOP_LOGPROBS) of those ids; -inf where the id is -1."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-softmax of the target's logits at the positions of one prefill chunk."""

    chosen: NDArray[np.float32]
    """(num_tokens,) of the token that follows each position."""
    top_ids: NDArray[np.int64]
    """(num_tokens, MAX_TOP_LOGPROBS), see StepLogprobs."""
    top_logprobs: NDArray[np.float32]
    """(num_tokens, MAX_TOP_LOGPROBS)."""


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step on its way. Runners derive from it: they keep their own copies of what the host will
    read, because the next launch overwrites the device's."""

    slots: tuple[int, ...]
    """Rows of the step."""
    key: GraphKey
    """The captured pair that runs it."""
    variant: StepVariant
    num_query_tokens: int
    """Total that was asked for."""


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
    drafts: NDArray[np.int64]
    """(num_rows, K) new drafts: what the next step verifies after the last emitted token."""
    logprobs: StepLogprobs | None = None
    """Of a rich step; None for a fused one."""
    graph_s: float = 0.0
    """Seconds that the device ran the step's graph, both halves of a rich one together; 0 where
    nobody measured them."""


class StepRunner(Protocol):
    """A device with max_num_reqs slots (1..max_num_reqs) and num_blocks blocks (0 is the null one).

    A slot's life: prefill calls in position order, start, then steps and set_blocks, then stop.
    stop may also come before start. Slot 0 and block 0 are never handed out.

    A step is launched and collected. The next one may be launched before the last is collected;
    collecting is in the order of launching, with at most two steps on their way. Launching reads
    nothing from the device. A rich step is launched in two halves, with nothing between them but
    the collecting of earlier steps: launch_forward, then launch_choice.
    """

    num_draft_tokens: int
    max_num_reqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    prefill_chunk_sizes: tuple[int, ...]
    vocab_size: int
    has_rich: bool
    """Whether the rich variant is captured; without it no SlotRequest has `rich` and no chunk asks
    for logprobs."""
    start_up_report: str
    """The phases of start-up as a table, empty where nothing was measured."""

    @property
    def num_snapshots(self) -> int:
        """Windows that it can keep for a prefix cache; 0 for no such cache."""
        ...

    @property
    def keep_tokens(self) -> int:
        """Tokens that a bounded replay keeps in the decoder's layers; 0 for exact prefill."""
        ...

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
        following: Sequence[int] | None = None,
    ) -> PromptLogprobs | None:
        """Compute the state of positions start .. start + len(token_ids) - 1 of a slot.

        token_ids: 1 to prefill_chunk_sizes[-1] ids. history: ids at start-3, start-2, start-1.
        block_ids: the slot's block table, covering at least every position written.
        start == 0 begins a new text: whatever the slot held before is gone. So does load_window,
        for a text that starts later.
        following: the prompt's ids at positions start+1 .. start + len(token_ids); given, their
        log-probabilities are returned, otherwise None.
        """

    def start(self, slot: int, request: SlotRequest, block_ids: Sequence[int]) -> None:
        """Write the slot row; the slot's next decode step verifies no draft."""

    def set_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        """Replace a started slot's block table; the old table is a prefix of the new one."""

    def stop(self, slot: int) -> None:
        """Forget a slot; it and its blocks may be given to another request at once.

        A request that leaves before its first chunk gives back a slot that nothing was written to.
        """

    def bound_prefill(self, lower: int) -> None:
        """Before a chunk of a bounded replay: the first position whose window the decoder keeps."""

    def save_window(self, slot: int, snapshot: int, position: int) -> None:
        """Keep a slot's window before `position`, its last block boundary, as a snapshot.

        Only of runners that were built with room for snapshots. The slot may have been stopped.
        """

    def load_window(self, slot: int, snapshot: int, position: int) -> None:
        """Begin a text in a slot behind what is there: full blocks up to `position`, which the next
        prefill or start names in its table, and the window that was saved at that position."""

    def launch(self, slots: Sequence[int], num_query_tokens: int) -> LaunchedStep:
        """Start one fused step over started slots, none of which has a RichRequest.

        num_query_tokens: total wanted, len(slots) .. len(slots) * (K + 1). Block tables cover
        min(L + K + 1, max_seq_len) positions of every row.
        """

    def launch_forward(self, slots: Sequence[int], num_query_tokens: int) -> LaunchedStep:
        """Start the first half of a rich step, up to the logits; arguments as for `launch`."""

    def launch_choice(self, step: LaunchedStep, masks: NDArray[np.int32] | None) -> None:
        """Start the second half of the step that launch_forward returned.

        masks: (len(step.slots), K + 1, num_mask_words) words, bit set = allowed, for the token
        after each query token of a row (its certain token, then its drafts); rows without a grammar
        are all ones. None allows everything.
        """

    def collect(self, step: LaunchedStep) -> StepResult:
        """Wait for a launched step and return what it did."""

    def decode(self, slots: Sequence[int], num_query_tokens: int) -> StepResult:
        """Launch and collect one step without masks, rich if one of the slots is."""
