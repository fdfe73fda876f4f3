"""Index rows and step metadata on the CPU route, against plain torch and the step's own region."""

import pytest
import torch

from decodegrid.graphs.regions_metadata import TOKEN_OUTS, metadata_regions
from decodegrid.graphs.state import Capacity, compressor_ring_len, window_ring_len
from decodegrid.kernels.select_entries import entry_rows

pytestmark = pytest.mark.kernels


def draw(seed, low, high, shape):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_convert_index(tile, ratio, kind, tokens):
    block_size, top_k, blocks = 16, 12, 5
    capacity = blocks * block_size // ratio
    table = draw(1, 1, 50, (3, blocks))
    slot, lengths = draw(2, 0, 3, (tokens,)), draw(3, 0, capacity, (tokens,))
    ids = draw(4, -1, capacity, (tokens, top_k)).to(torch.int32)
    rows = torch.full((tokens, top_k), 99, dtype=kind)
    tile("index.convert_index", top_k=top_k, block_size=block_size, ratio=ratio,
         kind=str(kind)[6:])(ids, table, slot, lengths, rows)
    expected = torch.full((tokens, top_k), -1, dtype=kind)
    for token in range(tokens):
        physical = entry_rows(table[slot[token]], capacity, ratio, block_size)
        for place in range(top_k):
            entry = int(ids[token, place])
            if 0 <= entry < int(lengths[token]):
                expected[token, place] = physical[entry]
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_expand_ranges(tile, tokens):
    width = 20
    ranges = draw(5, 0, 9, (tokens, 4))
    rows = torch.full((tokens, width), 77)
    tile("index.expand_ranges", width=width)(ranges, rows)
    for token, (first, length, second, count) in enumerate(ranges.tolist()):
        line = [*range(first, first + length), *range(second, second + count)]
        line = (line + [-1] * width)[:width]
        assert rows[token].tolist() == line


@pytest.mark.parametrize(("reach", "after"), [(16, 0), (17, 4)])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_window_index(tile, reach, after, tokens):
    ring = 22
    positions, slot = draw(6, 0, 60, (tokens,)), draw(7, 0, 4, (tokens,))
    valid = draw(8, 0, 4, (tokens,)) > 0
    rows = torch.full((tokens, reach + after), 99)
    tile("index.window_index", reach=reach, after=after, ring=ring)(positions, slot, valid, rows)
    for token in range(tokens):
        last = int(positions[token]) + after
        seen = range(last - reach - after + 1, last + 1)
        live = bool(valid[token])
        line = [int(slot[token]) * ring + p % ring if live and p >= 0 else -1 for p in seen]
        assert rows[token].tolist() == line


OUTS = (
    "input_ids", "positions", "token_slot", "valid", "lookback", "ring_store", "compressor_store",
    "compressor_previous", "entry_store_one", "entry_store_two", "length_one", "length_two",
)


def region_outputs(config, capacity, state, num_rows, num_tokens):
    """All outputs of the step's region by name, poisoned before."""
    names = ("query_lens", "query_starts", *TOKEN_OUTS)
    outs = {}
    for name in names:
        rows = num_rows if name.startswith("query_") else num_tokens
        width = {"lookback": (4,), "window_index": (config.sliding_window,)}.get(name, ())
        kind = torch.bool if name == "valid" else torch.int64
        outs[name] = torch.full((rows, *width), 1 if name == "valid" else -99).to(kind)
    metadata_regions(config, capacity)["decode_metadata"].function(*state, *outs.values())
    return outs


@pytest.mark.parametrize(("slots", "total"), [
    ([1], 1), ([2], 6), ([3, 1, 2], 9), ([3, 0, 1, 0, 4], 14), ([4, 3, 2, 1], 24), ([0, 0], 2),
])
def test_decode_tokens(tile, tiny_config, slots, total):
    """Rows of all query lengths, pads among them, against the region of a decode step."""
    config, drafts = tiny_config, 5
    capacity = Capacity(num_slots=5, num_blocks=40, block_size=16, max_model_len=144,
                        num_draft_tokens=drafts)
    rows, seed = torch.tensor(slots), len(slots) * 31 + total
    seq_len = torch.tensor([1, 1, 2, 40, 131])
    state = dict(
        slots=rows, total=torch.tensor([total]), last_token=draw(seed, 0, 1024, (5,)),
        seq_len=seq_len, history=draw(seed + 1, -1, 1024, (5, 3)),
        max_seq_len=torch.full((5,), 144), drafts_in=draw(seed + 2, 0, 1024, (5, drafts)),
        num_drafts=draw(seed + 3, 0, drafts + 1, (5,)),
        confidence=torch.rand(5, drafts, generator=torch.Generator().manual_seed(seed)),
        block_table=draw(seed + 4, 1, 40, (5, 9)), compressed_ids=draw(seed + 5, 0, 768, (1024,)),
    )
    expected = region_outputs(config, capacity, state.values(), len(slots), total)
    made = {name: torch.full_like(expected[name], 1) for name in ("query_starts", *OUTS)}
    tile(
        "index.decode_tokens", num_drafts=drafts, ring=window_ring_len(config, drafts),
        compressor_ring=compressor_ring_len(drafts), block_size=16, vocab=1024, ngram=4, pad_id=2,
        max_rows=8,
    )(
        rows, expected["query_lens"], state["last_token"], seq_len, state["history"],
        state["drafts_in"], state["block_table"], state["compressed_ids"],
        made["query_starts"], *(made[name] for name in OUTS),
    )
    for name, value in made.items():
        assert torch.equal(value, expected[name]), name
