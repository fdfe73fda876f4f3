"""Puts a runner into the state that a dumped step started from.

Owns the tokens that a dump does not tell, the rules by which a dump fits a runner, and the writing
of slot rows. Pools and rings are computed again, by prefill; they equal what decode steps had left
there up to rounding, and hold nothing of a fault that an earlier step left behind. Data flow: Dump
and a step of it -> checks -> prefill chunks, slot rows, drafts.
"""

from collections.abc import Sequence
from zlib import crc32

import torch

from decodegrid.engine.replay_dump import ChunkFacts, DecodeFacts, Dump, RequestFacts, RowFacts
from decodegrid.engine.replay_file import DumpError
from decodegrid.engine.runner import Runner
from decodegrid.engine.runner_protocol import HISTORY_LEN, RichRequest, SlotRequest


def check_fit(runner: Runner, dump: Dump, step: DecodeFacts | ChunkFacts) -> None:
    """Raise DumpError, with both numbers, where the runner cannot hold the step."""
    used = step.rows if isinstance(step, DecodeFacts) else (step,)
    if runner.num_draft_tokens != dump.sizes.num_draft_tokens:
        raise DumpError(
            f"the dump's steps have {dump.sizes.num_draft_tokens} drafts, this deployment's have "
            f"speculation.num_draft_tokens = {runner.num_draft_tokens}"
        )
    if runner.block_size != dump.sizes.block_size:
        raise DumpError(
            f"the dump's blocks have {dump.sizes.block_size} tokens, this deployment's have "
            f"cache.block_size = {runner.block_size}"
        )
    slots = [item.slot for item in used]
    if len(set(slots)) != len(slots):
        raise DumpError(f"step {step.index} has one slot twice")
    _at_most("slot", max(slots), "scheduler.max_num_reqs", runner.max_num_reqs)
    for item in used:
        request = dump.requests[item.request]
        blocks = request.block_ids[: item.num_blocks]
        if min(blocks) < 1 or len(set(blocks)) != len(blocks):
            raise DumpError(f"request {item.request} has a block twice, or block 0")
        _at_most("block", max(blocks), "the last block of the pool is", runner.num_blocks - 1)
        end = item.seq_len if isinstance(item, RowFacts) else item.start + item.num_tokens
        _at_most("length", request.max_seq_len, "scheduler.max_model_len", runner.max_model_len)
        _at_most("length", end, "the blocks hold", item.num_blocks * runner.block_size)
        _at_most("length", end, "the request ends at", request.max_seq_len)
        for token_id in (*(request.token_ids or ()), *request.stop_token_ids):
            _at_most("token id", token_id, "the last id is", runner.vocab_size - 1)


def _at_most(what: str, value: int, limit_name: str, limit: int) -> None:
    if value > limit:
        raise DumpError(f"the dump has {what} {value}; {limit_name} {limit}")


def made_up_id(block_id: int, offset: int, vocab_size: int) -> int:
    """A token id that depends on where it stands: equal for requests that share a block."""
    return crc32(f"{block_id}:{offset}".encode()) % vocab_size


def tokens_of(request: RequestFacts, length: int, block_size: int, vocab_size: int) -> list[int]:
    """The first `length` ids of a request: as dumped, made up from where those end."""
    known = list((request.token_ids or ())[:length])
    for position in range(len(known), length):
        block, offset = divmod(position, block_size)
        # A length that its blocks do not cover was refused before.
        known.append(made_up_id(request.block_ids[block], offset, vocab_size))
    return known


def history_before(token_ids: Sequence[int], position: int) -> tuple[int, int, int]:
    """Ids at position-3, position-2, position-1; -1 before the start."""
    before = list(token_ids[max(0, position - HISTORY_LEN) : position])
    first, second, third = [-1] * (HISTORY_LEN - len(before)) + before
    return first, second, third


class StateBuilder:
    """Rebuilds a step's state on a runner that serves nobody.

    runner: whose slots, pools and rings are overwritten. Raises DumpError where the step does not
    fit it.
    """

    def __init__(self, runner: Runner, dump: Dump, step: DecodeFacts | ChunkFacts) -> None:
        check_fit(runner, dump, step)
        self.runner, self.dump, self.step = runner, dump, step

    def build(self) -> None:
        """Write everything that the step reads; may be called again for another run of it."""
        for slot in range(1, self.runner.max_num_reqs + 1):
            self.runner.stop(slot)
        if isinstance(self.step, ChunkFacts):
            self._prefill(self.step, self.step.start)
            return
        for row in self.step.rows:
            self._prefill(row, row.seq_len - 1)
        for row in self.step.rows:
            self._start(row)
            self._install_drafts(row)

    def chunk(self) -> tuple[int, list[int], int, tuple[int, int, int], list[int]]:
        """Arguments of runner.prefill for a chunk of the dump."""
        assert isinstance(self.step, ChunkFacts)
        step, end = self.step, self.step.start + self.step.num_tokens
        ids = self._tokens(step, end)
        blocks = self._blocks(step)
        return step.slot, ids[step.start :], step.start, history_before(ids, step.start), blocks

    def notes(self) -> list[str]:
        """What of the step was made up, one fact a line."""
        found = []
        if not self.dump.has_token_ids:
            found.append("token ids: not in the dump; made-up ids of the same lengths take part")
        if isinstance(self.step, ChunkFacts):
            return found
        waiting = [row for row in self.step.rows if not row.fresh]
        if any(row.confidence is None for row in waiting):
            found.append(
                "drafts: those of some rows are unknown, made-up ones with confidence 1 take part"
            )
        elif waiting and any(row.drafts is None for row in waiting):
            found.append("drafts: made up, with the dumped confidences")
        if not self.step.is_exact:
            found.append("lengths: an earlier step was on its way; they are those before that step")
        if any(self._has_grammar(row) for row in self.step.rows):
            found.append("grammar masks: not in the dump; every token is allowed")
        state = self.runner.model.state
        if waiting and state.capacity.keeps_draft_distributions:
            found.append("draft distributions: not in the dump; each draft counts as certain")
        return found

    def _has_grammar(self, row: RowFacts) -> bool:
        rich = self.dump.requests[row.request].rich
        return rich is not None and rich.has_grammar

    def _blocks(self, item: RowFacts | ChunkFacts) -> list[int]:
        return list(self.dump.requests[item.request].block_ids[: item.num_blocks])

    def _tokens(self, item: RowFacts | ChunkFacts, length: int) -> list[int]:
        request = self.dump.requests[item.request]
        return tokens_of(request, length, self.runner.block_size, self.runner.vocab_size)

    def _prefill(self, item: RowFacts | ChunkFacts, length: int) -> None:
        """Compute the state of the first `length` positions of an item's slot."""
        ids, blocks = self._tokens(item, length), self._blocks(item)
        size = self.runner.prefill_chunk_sizes[-1]
        for start in range(0, length, size):
            chunk = ids[start : start + size]
            self.runner.prefill(item.slot, chunk, start, history_before(ids, start), blocks)

    def _start(self, row: RowFacts) -> None:
        request = self.dump.requests[row.request]
        ids = self._tokens(row, row.seq_len)
        rich, made = request.rich, None
        if rich is not None:
            cut = min(request.num_prompt_tokens, len(ids))
            made = RichRequest(
                logit_bias=rich.logit_bias,
                presence_penalty=rich.presence_penalty,
                frequency_penalty=rich.frequency_penalty,
                repetition_penalty=rich.repetition_penalty,
                min_seq_len=rich.min_seq_len,
                banned_before=rich.banned_before,
                prompt_token_ids=ids[:cut],
                output_token_ids=ids[cut:],
                num_top_logprobs=rich.num_top_logprobs,
                has_grammar=rich.has_grammar,
            )
        slot_request = SlotRequest(
            last_token=ids[-1],
            seq_len=len(ids),
            history=history_before(ids, len(ids) - 1),
            max_seq_len=request.max_seq_len,
            temperature=request.temperature,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            top_p=request.top_p,
            top_k=request.top_k,
            max_drafts=request.max_drafts,
            min_p=request.min_p,
            rich=made,
        )
        self.runner.start(row.slot, slot_request, self._blocks(row))

    def _install_drafts(self, row: RowFacts) -> None:
        """The drafts that the step verifies, with the confidences that share out its tokens."""
        count, slots = self.runner.num_draft_tokens, self.runner.model.state.slots
        if row.fresh or count == 0:
            return
        vocab = self.runner.vocab_size
        drafts = [made_up_id(-1 - row.slot, place, vocab) for place in range(count)]
        if row.drafts is not None:
            # A step that went wrong may have made ids that are none.
            drafts = [min(max(item, 0), vocab - 1) for item in row.drafts]
        rates = [1.0] * count if row.confidence is None else list(row.confidence)
        if len(drafts) != count or len(rates) != count:
            raise DumpError(f"a row has {len(drafts)} drafts and {len(rates)} rates, not {count}")
        most = self.dump.requests[row.request].max_drafts
        device = slots.drafts.device
        with torch.no_grad():
            slots.drafts[row.slot, :count] = torch.tensor(drafts, device=device)
            slots.confidence[row.slot, :count] = torch.tensor(rates, device=device).to(
                slots.confidence.dtype
            )
            slots.num_drafts[row.slot] = count if most is None else min(count, most)
            if self.runner.model.state.capacity.keeps_draft_distributions:
                certain = slots.draft_log_probs[row.slot]
                certain.fill_(-torch.inf)
                certain.scatter_(1, slots.drafts[row.slot, :count].unsqueeze(1), 0.0)
