"""Cases of values for the kernels of a step's bookkeeping and of its sampling.

What rows and tokens hold is stated token by token, in Python's integers. Needs neither pytest,
TileLang nor pydantic.
"""

import torch

from decodegrid.kernels import sampling, verify
from decodegrid.kernels.filters import filter_logits
from decodegrid.kernels.select_entries import entry_rows
from tests.gpu.case_form import Case, Sizes, draw, ints


def convert_index(sizes: Sizes) -> Case:
    """Nine tokens of three requests."""
    block_size, ratio, top_k = sizes["block_size"], sizes["ratio"], sizes["top_k"]
    capacity, table = 5 * block_size // ratio, ints(7, 1, 50, 3, 5)
    slot, lengths = ints(8, 0, 3, 9), ints(9, 0, capacity, 9)
    ids = ints(10, -1, capacity, 9, top_k)
    rows = torch.stack([entry_rows(table[s], capacity, ratio, block_size) for s in slot])
    live = (ids >= 0) & (ids < lengths.unsqueeze(1))
    want = rows.gather(1, ids.clamp(min=0)).where(live, torch.full_like(ids, -1))
    out = torch.full_like(ids, -99)
    return Case([ids.to(torch.int32), table, slot, lengths, out], {4: want})


def expand_ranges(sizes: Sizes) -> Case:
    """Six rows."""
    ranges, lines = ints(11, 0, 9, 6, 4), []
    for first, length, second, count in ranges.tolist():
        line = [*range(first, first + length), *range(second, second + count)]
        lines.append((line + [-1] * sizes["width"])[: sizes["width"]])
    out = torch.full((6, sizes["width"]), -99)
    return Case([ranges, out], {1: torch.tensor(lines)})


def window_index(sizes: Sizes) -> Case:
    """Seven tokens, pads among them."""
    reach, after, ring = sizes["reach"], sizes["after"], sizes["ring"]
    position, slot = ints(12, 0, 4 * reach, 7), ints(13, 0, 4, 7)
    valid = ints(14, 0, 4, 7) > 0
    seen = position.unsqueeze(1) - reach + 1 + torch.arange(reach + after)
    rows = slot.unsqueeze(1) * ring + seen.clamp(min=0) % ring
    want = rows.where(valid.unsqueeze(1) & (seen >= 0), torch.full_like(rows, -1))
    return Case([position, slot, valid, torch.full_like(want, -99)], {3: want})


QUERY_LENS = {3: 6, 1: 1, 4: 3, 2: 2}
"""Query tokens of the slots that run; slot 0 is the pads'."""


def _entry_row(row: list[int], position: int, ratio: int, block_size: int) -> int:
    """Pool row of the entry that a position completes, 0 for none."""
    if (position + 1) % ratio:
        return 0
    per_block, entry = block_size // ratio, position // ratio
    block = min(entry // per_block, len(row) - 1)
    return row[block] * per_block + entry % per_block


def _token_facts(sizes: Sizes, slot: int, position: int, token: int, table: list[int]) -> list[int]:
    """What a live token's place is, in the order of TOKEN_FACTS."""
    ring, rings, block_size = sizes["ring"], sizes["compressor_ring"], sizes["block_size"]
    return [
        min(max(token, 0), sizes["vocab"] - 1),
        position,
        slot,
        1,
        slot * ring + position % ring,
        slot * rings + position % rings,
        slot * rings + max(position - 1, 0) % rings,
        _entry_row(table, position, 1, block_size),
        _entry_row(table, position, 2, block_size),
        position + 1,
        (position + 1) // 2,
    ]


def decode_tokens(sizes: Sizes) -> Case:
    """Six rows, two of them pads, and three surplus tokens; a first token, and one in a block's
    last place."""
    drafts, block_size = sizes["num_drafts"], sizes["block_size"]
    slots, classes = [3, 0, 1, 4, 0, 2], 600
    lens = [QUERY_LENS.get(slot, 0) for slot in slots]
    starts = [sum(lens[:row]) for row in range(len(slots))]
    last, history = ints(51, 0, sizes["vocab"], 5), ints(52, -1, classes + 9, 5, 3)
    offered, table = ints(53, 0, sizes["vocab"], 5, drafts), ints(54, 1, 40, 5, 9)
    compressed = ints(55, 0, 500, classes)
    seq_len = torch.tensor([1, 1, 2, 2 * block_size - 2, 9 * block_size - 4])
    facts, lookback = [], []
    for place in range(sum(lens) + 3):
        row = sum(start + size <= place for start, size in zip(starts, lens, strict=True))
        live = row < len(slots)
        slot = slots[row] if live else 0
        # A surplus token counts from the last row, and is of the null slot.
        offset = min(max(place - starts[min(row, len(slots) - 1)], 0), drafts)
        known = [*history[slot].tolist(), int(last[slot]), *offered[slot].tolist()]
        back = [3 + offset - n for n in range(sizes["ngram"])]
        seen = [known[i] if i >= 0 else -1 for i in back]
        lookback.append(
            [int(compressed[min(i, classes - 1) if i >= 0 else sizes["pad_id"]]) for i in seen]
        )
        position = int(seq_len[slot]) - 1 + offset
        found = _token_facts(sizes, slot, position, seen[0], table[slot].tolist())
        facts.append(found if live else [0] * len(TOKEN_FACTS))
    columns = zip(*facts, strict=True)
    made = {name: torch.tensor(part) for name, part in zip(TOKEN_FACTS, columns, strict=True)}
    made["valid"] = made["valid"].bool()
    made["lookback"] = torch.tensor(lookback)
    wanted = [torch.tensor(starts), *(made[name] for name in OUTPUTS)]
    outs = [~value if value.dtype == torch.bool else value - 99 for value in wanted]
    inputs = [
        torch.tensor(slots), torch.tensor(lens), last, seq_len, history, offered, table, compressed,
    ]  # fmt: skip
    return Case([*inputs, *outs], {len(inputs) + i: value for i, value in enumerate(wanted)})


TOKEN_FACTS = (
    "input_ids", "positions", "token_slot", "valid", "ring_store", "compressor_store",
    "compressor_previous", "entry_store_one", "entry_store_two", "length_one", "length_two",
)  # fmt: skip
OUTPUTS = (*TOKEN_FACTS[:4], "lookback", *TOKEN_FACTS[4:])
"""What `decode_tokens` writes after the rows' starts, in order."""


def split_lengths(sizes: Sizes) -> Case:
    """32 rows, half of the drafts, ties among them."""
    rows, drafts = min(32, sizes["max_rows"]), sizes["num_drafts"]
    coarse = torch.rand(rows, drafts, generator=torch.Generator().manual_seed(15))
    rates = verify.survival((coarse * 4).round() / 4)
    limits, live = ints(16, 0, drafts + 1, rows), ints(17, 0, 5, rows) > 0
    total = torch.tensor([rows + rows * drafts // 2])
    want = verify.split_verify_lengths(rates, limits, live, total)
    return Case([rates, limits, live, total, torch.full_like(want, -5)], {4: want})


def accept(sizes: Sizes) -> Case:
    """Nine rows, two of them pads. Drafts equal the target's choices up to every place, and beyond
    what was verified too; stop tokens come before, at and behind the last one that is emitted."""
    drafts = sizes["num_drafts"]
    slots = [3, 0, 6, 1, 0, 7, 5, 2, 4]
    lens = [6, 0, 6, 5, 0, 4, 1, 2, 3]
    equal = [5, 0, 3, 5, 0, 1, 5, 0, 5]
    starts = [sum(lens[:row]) for row in range(len(slots))]
    chosen, offered = ints(62, 0, 4, sum(lens)), ints(63, 0, 4, 9, drafts)
    for slot, start, count in zip(slots, starts, equal, strict=True):
        for j in range(drafts):
            token = int(chosen[min(start + j, len(chosen) - 1)])
            offered[slot, j] = token if j < count else (token + 1) % 4
    last, seq_len = ints(64, 0, 9, 9), ints(65, 1, 90, 9)
    history, before = ints(66, -1, 9, 9, 3), ints(67, 0, 6, 9)
    stops = ints(68, -4, 4, 9, sizes["stop_ids"]).clamp(min=-1)
    stops[:, 1:] = -1
    state = [last.clone(), seq_len.clone(), history.clone(), before.clone()]
    tokens, emitted, stopped = [], [], []
    for slot, size, start in zip(slots, lens, starts, strict=True):
        line = [int(chosen[min(start + j, len(chosen) - 1)]) for j in range(drafts + 1)]
        kept = 0
        while kept < min(size - 1, drafts) and line[kept] == int(offered[slot, kept]):
            kept += 1
        known = [*history[slot].tolist(), int(last[slot]), *offered[slot].tolist()]
        live = slot > 0
        ends = set(stops[slot].tolist())
        tokens.append(line)
        emitted.append(kept + 1 if live else 0)
        stopped.append(live and any(token in ends for token in line[: kept + 1]))
        state[0][slot] = line[kept] if live else 0
        state[1][slot] = int(seq_len[slot]) + kept + 1 if live else 1
        state[2][slot] = torch.tensor(known[kept + 1 : kept + 4] if live else [-1] * 3)
        state[3][slot] = 0
    wanted = [torch.tensor(tokens), torch.tensor(emitted), torch.tensor(stopped)]
    outs = [torch.full_like(wanted[0], -9), torch.full_like(wanted[1], -9), ~wanted[2]]
    rows = [torch.tensor(part) for part in (slots, lens, starts)]
    tensors = [chosen, *rows, last, seq_len, history, offered, before, stops, *outs]
    places = (4, 5, 6, 8, 10, 11, 12)
    return Case(tensors, dict(zip(places, (*state, *wanted), strict=True)))


def uniform_bits(sizes: Sizes) -> Case:
    """Four rows of large seeds."""
    seed, place = torch.tensor([0, 1, 2**32, 2**63 - 1]), torch.tensor([0, 7, 2**21 - 1, 2**28])
    wide = sampling.uniform_bits(seed, place, sizes["vocab"])
    want = torch.where(wide >= 2**31, wide - 2**32, wide).to(torch.int32)
    return Case([seed, place, torch.zeros_like(want)], {2: want})


def gumbel_noise(sizes: Sizes) -> Case:
    """Four rows, one of temperature 0."""
    seed, place = torch.tensor([0, 1, 2**32, 2**63 - 1]), torch.tensor([0, 7, 2**21 - 1, 2**28])
    heat = torch.tensor([1.0, 0.0, 0.5, 1.0])
    want = sampling.gumbel_noise(seed, place, heat, sizes["vocab"])
    return Case([seed, place, heat, torch.full_like(want, torch.nan)], {3: want}, 2e-6, 2e-6)


_FILTERS = ((1.0, -1, 0.0), (0.9, -1, 0.0), (0.5, 7, 0.0), (1.0, 40, 0.0), (0.95, 50, 0.01))


def filters(sizes: Sizes) -> Case:
    """Each filter at two temperatures; logits far enough apart for any order of sums."""
    logits = draw(18, 2 * len(_FILTERS), sizes["vocab"]) * 3
    heat = torch.tensor([0.7, 0.0]).repeat(len(_FILTERS))
    top_p, top_k, min_p = (
        torch.tensor(part).repeat_interleave(2) for part in zip(*_FILTERS, strict=True)
    )
    want = filter_logits(logits, heat, top_p, top_k, min_p)
    tensors = [logits, heat, top_p, top_k, min_p, torch.full_like(logits, torch.nan)]
    return Case(tensors, {5: want})
