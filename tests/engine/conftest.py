"""A toy language model behind the runner protocol, and a tokenizer of bytes.

The toy's next token is a hash of all tokens before it, read back through the block table, so a
block that is missing, shared, stale or out of order changes the output or fails an assertion.
Whether its drafts are right is a switch.
A step's work is done at its launch, as it looks to everything that is launched after it, and what
it did is seen by nobody before collect() tells.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import deepseek_recipe as recipe
import numpy as np
import pytest
import tokenizers

from decodegrid.capture.grid import Grid, StepVariant
from decodegrid.engine.runner_protocol import (
    MAX_TOP_LOGPROBS,
    LaunchedStep,
    PromptLogprobs,
    SlotRequest,
    StepLogprobs,
    StepResult,
    num_mask_words,
)
from decodegrid.engine.tokenizer import Tokenizer

SPECIALS = ["Bos", "Eos", "User", "Assistant", "System", "ThinkingStart", "ThinkingEnd", "Dsml"]
FIRST_BYTE_ID = len(SPECIALS) + 2
VOCAB_SIZE = FIRST_BYTE_ID + 256
STALE = -99


@dataclass(frozen=True)
class Key:
    num_reqs: int
    num_query_tokens: int


@dataclass
class Slot:
    blocks: list[int]
    num_computed: int = 0
    request: SlotRequest | None = None
    seq_len: int = 0
    last_token: int = STALE
    drafts: list[int] = field(default_factory=list)
    stopped: bool = False
    """The last step emitted one of its stop tokens."""


@dataclass(slots=True, eq=False)
class FakeStep(LaunchedStep):
    """A launched step; the runner alone looks into it."""

    result: StepResult | None = None
    widths: tuple[int, ...] = ()


def toy_hash(*parts: object) -> int:
    """32 bits that depend on every part.

    Not a CRC: that is linear, so that two seeds whose CRCs share their low bits would draw the
    same tokens at every position.
    """
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


class ToyModel:
    """Next token = hash of the tokens before it; with a temperature, of the seed too."""

    def next_token(self, tokens: Sequence[int], temperature: float = 0.0, seed: int = 0) -> int:
        assert STALE not in tokens, "a position that was never written is read"
        noise = (temperature, seed) if temperature else ()
        value = toy_hash(tuple(tokens), noise)
        return FIRST_BYTE_ID + value % (VOCAB_SIZE - FIRST_BYTE_ID)

    def generate(
        self, prompt: Sequence[int], num_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(self.next_token(tokens, temperature, seed))
        return tokens[len(prompt) :]


class ScriptedModel(ToyModel):
    """Continues every prompt of a given length with the same tokens, then with the toy's."""

    def __init__(self, num_prompt_tokens: int, script: Sequence[int]) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.script = list(script)

    def next_token(self, tokens: Sequence[int], temperature: float = 0.0, seed: int = 0) -> int:
        index = len(tokens) - self.num_prompt_tokens
        if 0 <= index < len(self.script):
            assert STALE not in tokens
            return self.script[index]
        return super().next_token(tokens, temperature, seed)


def first_allowed(token_id: int, mask: np.ndarray) -> int:
    """The id, or the next one that a mask row allows."""
    bits = np.unpackbits(mask.astype("<i4").view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    allowed = np.flatnonzero(bits)
    return int(allowed[np.searchsorted(allowed, token_id) % len(allowed)])


def fake_logprobs(token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A token's log-probability depends on its id, and it is the most probable one."""
    chosen = (-1.0 - token_ids % 7).astype(np.float32)
    place = np.arange(MAX_TOP_LOGPROBS)
    top_ids = (token_ids[..., None] + place) % VOCAB_SIZE
    return chosen, top_ids, (chosen[..., None] - place).astype(np.float32)


class FakeRunner:
    """StepRunner over a toy model; every rule of the protocol is an assertion."""

    def __init__(
        self,
        *,
        num_draft_tokens: int = 5,
        max_num_reqs: int = 4,
        max_model_len: int = 96,
        block_size: int = 4,
        num_blocks: int = 0,
        prefill_chunk_sizes: tuple[int, ...] = (4, 8),
        drafts: int | Literal["mixed", "random"] = 99,
        model: ToyModel | None = None,
    ) -> None:
        """drafts: how many of each row's drafts are right, "mixed" for a changing number of leading
        ones, or "random" for each with a chance of three in four."""
        self.num_draft_tokens = num_draft_tokens
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_blocks = num_blocks or 1 + max_num_reqs * -(-max_model_len // block_size)
        self.prefill_chunk_sizes = prefill_chunk_sizes
        self.vocab_size = VOCAB_SIZE
        self.num_snapshots = 0
        self.keep_tokens = 0
        self.num_compilations = 3
        self.num_captured = 5
        self.has_rich = True
        self.start_up_report = "phase table of the fake"
        self.drafts = drafts
        self.confidence = 0.5
        self.graph_s = 1e-3
        self.grid: Grid | None = None
        """Where keys come from; None makes keys that count pads and need no grid."""
        self.model = model or ToyModel()
        self.slots: dict[int, Slot] = {}
        self.memory = np.full((self.num_blocks, block_size), STALE, dtype=np.int64)
        self.log: list[tuple[str, ...] | tuple[str, int] | tuple[str, int, int]] = []
        self.uncollected: list[FakeStep] = []
        self.half: FakeStep | None = None
        """A rich step whose choice is not launched."""
        self.order: list[str] = []
        """launch, choice and collect, as they came."""
        self.most_in_flight = 0
        """Steps on their way at once."""

    def prefill(
        self,
        slot: int,
        token_ids: Sequence[int],
        start: int,
        history: tuple[int, int, int],
        block_ids: Sequence[int],
        following: Sequence[int] | None = None,
    ) -> PromptLogprobs | None:
        assert not self.uncollected, "a chunk is computed while a step is in flight"
        assert 1 <= len(token_ids) <= self.prefill_chunk_sizes[-1]
        if start == 0:
            assert slot not in self.slots, "a slot is reused before it was stopped"
            self.slots[slot] = Slot([])
        state = self.slots[slot]
        assert state.request is None and start == state.num_computed
        self._own(slot, block_ids)
        assert list(history) == self._history(slot, start)
        for offset, token_id in enumerate(token_ids):
            self._write(slot, start + offset, token_id)
        state.num_computed += len(token_ids)
        self.log.append(("prefill", slot, len(token_ids)))
        if following is None:
            return None
        assert len(following) == len(token_ids)
        return PromptLogprobs(*fake_logprobs(np.array(following, dtype=np.int64)))

    def start(self, slot: int, request: SlotRequest, block_ids: Sequence[int]) -> None:
        assert self.half is None
        state = self.slots.setdefault(slot, Slot([]))
        assert state.request is None and state.num_computed == request.seq_len - 1
        assert request.seq_len < request.max_seq_len <= self.max_model_len
        assert len(request.stop_token_ids) <= 8 and 0 <= request.seed < 2**63
        self._own(slot, block_ids)
        assert list(request.history) == self._history(slot, request.seq_len - 1)
        state.request = request
        state.seq_len = request.seq_len
        state.last_token = request.last_token
        self.log.append(("start", slot))

    def set_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        assert self.half is None
        state = self.slots[slot]
        assert state.request is not None
        assert list(block_ids[: len(state.blocks)]) == state.blocks
        self._own(slot, block_ids)

    def stop(self, slot: int) -> None:
        assert self.half is None
        state = self.slots.pop(slot, None)
        if state is not None:  # else its request left before its first chunk
            self.memory[state.blocks] = STALE
        self.log.append(("stop", slot))

    def launch(self, slots: Sequence[int], num_query_tokens: int) -> LaunchedStep:
        assert all(self._request(slot).rich is None for slot in slots)
        step = self._begin(slots, num_query_tokens, StepVariant.FUSED)
        self._finish(step, None)
        return step

    def launch_forward(self, slots: Sequence[int], num_query_tokens: int) -> LaunchedStep:
        assert any(self._request(slot).rich is not None for slot in slots)
        self.half = self._begin(slots, num_query_tokens, StepVariant.RICH)
        return self.half

    def launch_choice(self, step: LaunchedStep, masks: np.ndarray | None) -> None:
        assert step is self.half and isinstance(step, FakeStep)
        assert self.uncollected == [step], "the step before is not collected"
        shape = (len(step.slots), self.num_draft_tokens + 1, num_mask_words(self.vocab_size))
        assert masks is None or masks.shape == shape
        self.half = None
        self.order.append("choice")
        self._finish(step, masks)

    def collect(self, step: LaunchedStep) -> StepResult:
        assert self.uncollected and step is self.uncollected[0], "steps are collected in order"
        assert isinstance(step, FakeStep) and step.result is not None
        self.uncollected.pop(0)
        self.order.append("collect")
        return step.result

    def decode(self, slots: Sequence[int], num_query_tokens: int) -> StepResult:
        return self.collect(self.launch(slots, num_query_tokens))

    def _begin(self, slots: Sequence[int], total: int, variant: StepVariant) -> "FakeStep":
        assert self.half is None and len(self.uncollected) <= 1, "two steps are on their way"
        assert len(set(slots)) == len(slots) <= self.max_num_reqs
        self.order.append("launch")
        key: Any = Key(1 << (len(slots) - 1).bit_length(), 2 * total)
        if self.grid is not None:
            key = self.grid.select(len(slots), total)
        widths = tuple(self._split(slots, total))
        step = FakeStep(tuple(slots), key, variant, total, widths=widths)
        self.uncollected.append(step)
        self.most_in_flight = max(self.most_in_flight, len(self.uncollected))
        return step

    def _finish(self, step: "FakeStep", masks: np.ndarray | None) -> None:
        num_rows, width = len(step.slots), self.num_draft_tokens + 1
        token_ids = np.full((num_rows, width), STALE, dtype=np.int64)
        drafts = np.full((num_rows, width - 1), STALE, dtype=np.int64)
        confidence = np.full((num_rows, width - 1), self.confidence, dtype=np.float32)
        num_emitted = np.zeros(num_rows, dtype=np.int64)
        for row, slot in enumerate(step.slots):
            emitted = self._verify(slot, step.widths[row], None if masks is None else masks[row])
            token_ids[row, : len(emitted)] = emitted
            num_emitted[row] = len(emitted)
            drafts[row, : len(self.slots[slot].drafts)] = self.slots[slot].drafts
            if self.slots[slot].stopped:
                confidence[row] = 0.0
        self.log.append(("decode", num_rows, step.num_query_tokens))
        verified = np.asarray(step.widths, dtype=np.int64) - 1
        logprobs = None
        if step.variant is StepVariant.RICH:
            logprobs = StepLogprobs(*fake_logprobs(token_ids))
        step.result = StepResult(
            token_ids, num_emitted, verified, confidence, sum(step.widths), step.key, drafts,
            logprobs, self.graph_s,
        )  # fmt: skip

    def _request(self, slot: int) -> SlotRequest:
        request = self.slots[slot].request
        assert request is not None
        return request

    def _split(self, slots: Sequence[int], num_query_tokens: int) -> list[int]:
        """One token a row, the rest by draft position and then by row, none to stopped rows.

        Rows at their length limit and tokens that nobody can use come only where the step before
        was not known yet.
        """
        room = []
        is_behind = bool(self.uncollected)
        for slot in slots:
            state, most = self.slots[slot], self._request(slot).max_seq_len
            assert state.seq_len < most or is_behind
            offered = 0 if state.stopped else len(state.drafts)
            room.append(max(1, min(offered + 1, most - state.seq_len)))
        assert len(slots) <= num_query_tokens <= len(slots) * (self.num_draft_tokens + 1)
        assert num_query_tokens <= sum(room) or is_behind
        widths = [1] * len(slots)
        left = num_query_tokens - len(slots)
        for position in range(1, self.num_draft_tokens + 1):
            for row in range(len(slots)):
                if left and room[row] > position:
                    widths[row] += 1
                    left -= 1
        return widths

    def _verify(self, slot: int, width: int, masks: np.ndarray | None) -> list[int]:
        state, request = self.slots[slot], self._request(slot)
        needed = min(state.seq_len + self.num_draft_tokens + 1, request.max_seq_len)
        assert len(state.blocks) * self.block_size >= needed
        fed = [state.last_token, *state.drafts[: width - 1]]
        emitted: list[int] = []
        for index, token_id in enumerate(fed):
            self._write(slot, state.seq_len - 1 + index, token_id)
        for index in range(width):
            context = self._read(slot, state.seq_len + index)
            token_id = self.model.next_token(context, request.temperature, request.seed)
            emitted.append(token_id if masks is None else first_allowed(token_id, masks[index]))
            if index + 1 < width and fed[index + 1] != emitted[-1]:
                break
        context = self._read(slot, state.seq_len) + emitted
        state.seq_len += len(emitted)
        state.last_token = emitted[-1]
        state.stopped = not set(emitted).isdisjoint(request.stop_token_ids)
        state.drafts = self._draft(context, request)
        return emitted

    def _draft(self, context: list[int], request: SlotRequest) -> list[int]:
        count = self.num_draft_tokens
        truth: list[int] = []
        for _ in range(count):
            token_id = self.model.next_token(context + truth, request.temperature, request.seed)
            truth.append(token_id)
        right = len(context) * 7 % (count + 1) if self.drafts == "mixed" else self.drafts
        right = 0 if right == "random" else right
        drafts = [t if i < right else (t + 1) % VOCAB_SIZE for i, t in enumerate(truth)]
        if self.drafts == "random":
            noise = [toy_hash(i, context) for i in range(count)]
            drafts = [t if x % 4 else x % VOCAB_SIZE for t, x in zip(truth, noise, strict=True)]
        return drafts[: request.max_drafts]

    def _own(self, slot: int, block_ids: Sequence[int]) -> None:
        assert 1 <= slot <= self.max_num_reqs
        assert all(0 < block_id < self.num_blocks for block_id in block_ids)
        assert len(set(block_ids)) == len(block_ids)
        for other, state in self.slots.items():
            assert other == slot or not set(state.blocks) & set(block_ids), "a block has two owners"
        self.slots[slot].blocks = list(block_ids)

    def _write(self, slot: int, position: int, token_id: int) -> None:
        block_id = self.slots[slot].blocks[position // self.block_size]
        self.memory[block_id, position % self.block_size] = token_id

    def _read(self, slot: int, num_tokens: int) -> list[int]:
        rows = self.memory[self.slots[slot].blocks].reshape(-1)[:num_tokens]
        assert len(rows) == num_tokens
        return [int(token_id) for token_id in rows]

    def _history(self, slot: int, position: int) -> list[int]:
        return ([-1] * 3 + self._read(slot, position))[-3:]


@pytest.fixture
def toy() -> ToyModel:
    return ToyModel()


@pytest.fixture
def scripted() -> type[ScriptedModel]:
    return ScriptedModel


@pytest.fixture(scope="session")
def make_runner() -> Callable[..., FakeRunner]:
    return FakeRunner


@pytest.fixture(scope="session")
def byte_id() -> Callable[[int], int]:
    """Token id of a byte."""
    return lambda byte: FIRST_BYTE_ID + byte


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose tokens are the special ones and the 256 bytes, in byte order."""
    names = [getattr(recipe.SpecialToken, name).default_str() for name in SPECIALS]
    names += ["<one>", "<two>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    # The alphabet in byte order: printable bytes stand for themselves, the rest from U+0100 on.
    others = iter(char for char in alphabet if ord(char) > 255)
    chars = [chr(b) if chr(b) in alphabet else next(others) for b in range(256)]
    vocab = {name: index for index, name in enumerate([*names, *chars])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(names)
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return Tokenizer(path)


@pytest.fixture(scope="session")
def spell(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """spell(text): ids of an answer, its special tokens in one piece, with the end of text."""
    marks = {bytes_.decode(): token_id for token_id, bytes_ in tokenizer.mark_bytes.items()}

    def ids_of(text: str) -> list[int]:
        ids: list[int] = []
        while text:
            places = {text.find(mark): mark for mark in marks if mark in text}
            place = min(places, default=len(text))
            ids += tokenizer.encode(text[:place])[1:] if place else []
            ids += [marks[places[place]]] if places else []
            text = text[place + len(places[place]) :] if places else ""
        return [*ids, tokenizer.eos_token_id]

    return ids_of
