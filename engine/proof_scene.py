"""Made-up requests in the slots of an idle runner, in the middle of their decoding.

Owns their prompts, lengths, sampling parameters and drafts. Lengths run from one token to past
every window; drafts are what the target itself would choose, up to a place that is drawn for each
row, so that steps accept some and reject others. Pools and rings keep what prefill left there.

Data flow: a seed -> slots, blocks and prompts -> captured prefill and decode steps -> the state
that every proof starts from (`restore`).
"""

import random
from collections.abc import Sequence

import torch

from decodegrid.capture.grid import GraphKey
from decodegrid.engine.proof_state import LiveState
from decodegrid.engine.runner import Runner
from decodegrid.engine.runner_protocol import HISTORY_LEN, RichRequest, SlotRequest

CONTEXT_LEN = 320
"""Tokens of the longest context: past the window, and enough entries for a selective top-k."""


class Scene:
    """Live requests of one runner; needs its captured prefill sizes and largest pair.

    Args:
        runner: serves nobody; its slots are overwritten.
        seed: of everything that is made up.
    """

    def __init__(self, runner: Runner, seed: int) -> None:
        self.runner = runner
        self._draw = draw = random.Random(seed)
        self._key: GraphKey = max(runner.decode_graphs)
        num_rows = min(self._key.num_reqs, runner.num_blocks - 1)
        self.slots = draw.sample(range(1, runner.max_num_reqs + 1), num_rows)
        self.blocks = self._share_blocks(num_rows)
        self.lengths = self._choose_lengths(num_rows)
        self.texts = [self.ids(length) for length in self.lengths]
        self.live = LiveState(runner.model, self.slots, self.blocks)
        for row in range(num_rows):
            self._begin(row)
        if runner.num_draft_tokens:
            self._install_drafts(self._find_drafts())
        self._saved = self.live.save()

    def ids(self, count: int) -> list[int]:
        """Token ids, drawn."""
        vocab = self.runner.vocab_size
        return [self._draw.randrange(vocab) for _ in range(count)]

    def restore(self) -> None:
        """Put back what the requests' rows held when the scene was made."""
        self.live.load(self._saved)

    def room(self, row: int) -> int:
        """Tokens that a row's blocks hold, at most the length limit."""
        held = len(self.blocks[row]) * self.runner.block_size
        return min(self.runner.max_model_len, held)

    def history(self, row: int, position: int) -> tuple[int, int, int]:
        """The three ids before a position of a row's text; -1 before its start."""
        before = self.texts[row][max(0, position - HISTORY_LEN) : position]
        first, second, third = [-1] * (HISTORY_LEN - len(before)) + before
        return first, second, third

    def _share_blocks(self, num_rows: int) -> list[list[int]]:
        """Blocks in no order; row 0 has room for the largest chunk behind its context."""
        runner = self.runner
        order = list(range(1, runner.num_blocks))
        self._draw.shuffle(order)
        share = len(order) // num_rows
        step = CONTEXT_LEN + runner.num_draft_tokens + 1
        shared = []
        for row in range(num_rows):
            tokens = step + (runner.prefill_chunk_sizes[-1] if row == 0 else 0)
            tokens = min(tokens, runner.max_model_len)
            count = min(share, -(-tokens // runner.block_size))
            shared.append([order.pop() for _ in range(count)])
        return shared

    def _choose_lengths(self, num_rows: int) -> list[int]:
        """Of every row, with room for a step where there is any: the longest, the shortest, then
        any."""
        step = self.runner.num_draft_tokens + 1
        longest = [max(1, min(CONTEXT_LEN, self.room(row) - step)) for row in range(num_rows)]
        return [
            limit if row == 0 else 1 if row == 1 else self._draw.randint(1, limit)
            for row, limit in enumerate(longest)
        ]

    def _begin(self, row: int) -> None:
        """Prefill all but the last token and write the slot row."""
        runner, slot, text = self.runner, self.slots[row], self.texts[row]
        if runner.keep_tokens:
            runner.bound_prefill(max(0, len(text) - runner.keep_tokens))
        size = runner.prefill_chunk_sizes[-1]
        for start in range(0, len(text) - 1, size):
            chunk = text[start : min(start + size, len(text) - 1)]
            runner.prefill(slot, chunk, start, self.history(row, start), self.blocks[row])
        runner.start(slot, self._request(row), self.blocks[row])

    def _request(self, row: int) -> SlotRequest:
        draw, text = self._draw, self.texts[row]
        # Row 2 ends within the step, so that it cannot verify all its drafts.
        end = min(len(text) + 2, self.room(row)) if row == 2 else self.room(row)
        # Half of the rows are greedy; the others draw, most of them from a part of the tokens.
        heat = 0.0 if row % 2 == 0 else draw.choice((0.6, 1.0))
        return SlotRequest(
            last_token=text[-1],
            seq_len=len(text),
            history=self.history(row, len(text) - 1),
            max_seq_len=end,
            temperature=heat,
            seed=draw.getrandbits(63),
            stop_token_ids=tuple(self.ids(2)),
            top_p=draw.choice((1.0, 0.9)),
            top_k=draw.choice((-1, 20)),
            min_p=draw.choice((0.0, 0.02)),
            rich=self._rich(row) if self.runner.has_rich and row % 3 != 1 else None,
        )

    def _rich(self, row: int) -> RichRequest:
        draw, text = self._draw, self.texts[row]
        return RichRequest(
            logit_bias={token: draw.uniform(-2.0, 2.0) for token in self.ids(3)},
            presence_penalty=draw.uniform(0.0, 0.5),
            frequency_penalty=draw.uniform(0.0, 0.5),
            repetition_penalty=draw.uniform(1.0, 1.2),
            min_seq_len=len(text) + 2,
            banned_before=tuple(self.ids(2)),
            prompt_token_ids=text,
            output_token_ids=self.ids(4),
            num_top_logprobs=20,
            has_grammar=True,
        )

    def _find_drafts(self) -> list[list[int]]:
        """What each row's next steps emit without drafts: K single steps, taken back."""
        buffers, saved = self.runner.buffers, self.live.save()
        num_rows = len(self.slots)
        found: list[list[int]] = [[] for _ in self.slots]
        for _ in range(self.runner.num_draft_tokens):
            buffers.rows.slots.zero_()
            buffers.rows.slots[:num_rows] = torch.tensor(self.slots)
            buffers.total.fill_(num_rows)
            self.runner.decode_graphs[self._key].replay()
            tokens = buffers.rows.token_ids[:num_rows, 0].tolist()
            for row, token in enumerate(tokens):
                found[row].append(token)
        self.live.load(saved)
        return found

    def _install_drafts(self, drafts: Sequence[list[int]]) -> None:
        """Write drafts that are wrong from a place on, with confidences that decide the split."""
        slots, count = self.runner.model.state.slots, self.runner.num_draft_tokens
        vocab, draw = self.runner.vocab_size, self._draw
        generator = torch.Generator().manual_seed(draw.getrandbits(32))
        for slot, row in zip(self.slots, drafts, strict=True):
            wrong = draw.randint(0, count)
            ids = [min(max(token, 0), vocab - 1) for token in row[:wrong]]
            ids += self.ids(count - wrong)
            rates = [draw.uniform(0.05, 1.0) for _ in ids]
            slots.drafts[slot, :count] = torch.tensor(ids, device=slots.drafts.device)
            slots.confidence[slot, :count] = torch.tensor(rates, dtype=slots.confidence.dtype).to(
                slots.confidence.device
            )
            slots.num_drafts[slot] = count
            if self.runner.model.state.capacity.keeps_draft_distributions:
                logits = torch.randn((count, vocab), generator=generator)
                logits[range(count), ids] += 4.0
                slots.draft_log_probs[slot, :count] = logits.log_softmax(-1).to(
                    slots.draft_log_probs
                )
