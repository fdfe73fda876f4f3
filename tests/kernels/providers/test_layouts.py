"""Scale and weight layouts, byte by byte against the rules of the libraries.

The decoder here knows nothing of the code under test: it reads the bytes of the storage at the
places where a kernel would, from strides and the rules alone.
"""

import pytest
import torch

from decodegrid.kernels.providers import layouts
from decodegrid.kernels.quant import quantise_fp8_weight, quantise_q4x


def storage_bytes(tensor: torch.Tensor) -> bytes:
    """All bytes behind a tensor, the padding included."""
    return bytes(tensor.untyped_storage().tolist())


def read_word(tensor: torch.Tensor, *index: int) -> list[int]:
    """The four bytes of an int32 at an index, from the storage."""
    place = tensor.storage_offset() + sum(
        i * step for i, step in zip(index, tensor.stride(), strict=True)
    )
    return list(storage_bytes(tensor)[4 * place : 4 * place + 4])


def random_scales(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 128])
@pytest.mark.parametrize("blocks", [1, 4, 6, 8])
def test_packed_scales_place_by_place(rows: int, blocks: int) -> None:
    """int32 (rows, ceil(K / (4 * block))), dense along the rows, columns at multiples of 4 words,
    byte b of word w is block 4 * w + b."""
    scales = random_scales(rows, blocks)
    packed = layouts.pack_scales(scales)
    words = -(-blocks // 4)
    aligned = -(-rows // 4) * 4
    assert packed.dtype == torch.int32 and packed.shape == (rows, words)
    assert packed.stride() == (1, aligned)
    for row in range(rows):
        for word in range(words):
            want = [
                int(scales[row, 4 * word + byte]) if 4 * word + byte < blocks else 0
                for byte in range(4)
            ]
            assert read_word(packed, row, word) == want
    # What lies between the columns is zero, and nothing lies behind the last one.
    raw = storage_bytes(packed)
    assert len(raw) == 4 * aligned * words
    for word in range(words):
        assert not any(raw[4 * (word * aligned + rows) : 4 * (word + 1) * aligned])


def test_packed_scales_of_groups_follow_each_other() -> None:
    scales = random_scales(3, 5, 8)
    packed = layouts.pack_scales(scales)
    assert packed.shape == (3, 5, 2) and packed.stride() == (2 * 8, 1, 8)
    for group in range(3):
        assert torch.equal(packed[group], layouts.pack_scales(scales[group]))


def test_float_scales_are_padded_to_16_bytes() -> None:
    values = torch.rand(6, 3)
    found = layouts.mn_major(values)
    assert found.stride() == (1, 8) and torch.equal(found, values)
    wide = layouts.mn_major(values.double())
    assert wide.stride() == (1, 6) and torch.equal(wide, values.double())


def test_group_scales_are_packed_group_by_group() -> None:
    """The library permutes to (groups, tokens): packed there, viewed back."""
    scales = random_scales(5, 2, 8)
    found = layouts.pack_group_scales(scales)
    assert found.shape == (5, 2, 2)
    for group in range(2):
        assert torch.equal(found[:, group], layouts.pack_scales(scales[:, group]))
    inner = found.transpose(0, 1)
    assert inner.stride() == (16, 1, 8)


@pytest.mark.parametrize("shape", [(64, 96), (33, 40), (1, 32)])
def test_a_matrix_for_blackwell_reads_back(shape: tuple[int, int]) -> None:
    """Codes times the scale byte that a kernel finds for (row, block) is the stored weight."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    blocks = quantise_fp8_weight(weight)
    codes, scales = layouts.pack_matrix(blocks.codes, blocks.scales)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == shape
    values = codes.to(torch.float32)
    for row in range(shape[0]):
        for column in range(0, shape[1], 7):
            block = column // 32
            byte = read_word(scales, row, block // 4)[block % 4]
            assert byte == int(blocks.scales[row // 32, block])
            got = float(values[row, column]) * 2.0 ** (byte - 127)
            assert abs(got - float(weight[row, column])) <= 0.07 * abs(float(weight.abs().max()))


def test_a_matrix_for_hopper_is_exact_in_bfloat16() -> None:
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(2))
    blocks = quantise_fp8_weight(weight)
    wide = layouts.widen_tiles(blocks.codes, blocks.scales)
    assert wide.dtype == torch.bfloat16
    for row, column in ((0, 0), (31, 95), (32, 40), (69, 63)):
        code = int(blocks.codes[row, column])
        sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
        value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
        scale = 2.0 ** (int(blocks.scales[row // 32, column // 32]) - 127)
        assert float(wide[row, column]) == (-value if sign else value) * scale


def test_experts_for_blackwell() -> None:
    weight = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(3))
    blocks = quantise_q4x(weight)
    codes, scales = layouts.pack_experts(blocks.codes, blocks.scales)
    assert codes.dtype == torch.int8 and codes.shape == (2, 8, 32)
    assert torch.equal(codes.view(torch.uint8), blocks.codes)
    for expert in range(2):
        for row in range(8):
            want = [*blocks.scales[expert, row].tolist(), 0, 0]
            assert read_word(scales, expert, row, 0) == want


def test_gate_and_up_take_turns() -> None:
    rows = torch.arange(64).reshape(1, 64, 1)
    order = layouts.interleave_gate_up(rows).flatten().tolist()
    want = []
    for part in range(4):
        want += list(range(8 * part, 8 * part + 8)) + list(range(32 + 8 * part, 40 + 8 * part))
    assert order == want
    with pytest.raises(ValueError, match="20 rows of gate and up"):
        layouts.interleave_gate_up(torch.zeros(1, 20, 4))


def test_scale_memory_order() -> None:
    """Place 4 * b + a of 128 rows holds row 32 * a + b."""
    rows = torch.arange(256, dtype=torch.int32).reshape(1, 256, 1)
    found = layouts.utccp_scales(rows).flatten().tolist()
    for start in (0, 128):
        for a in range(4):
            for b in range(32):
                assert found[start + 4 * b + a] == start + 32 * a + b
    with pytest.raises(ValueError, match="a multiple of 128"):
        layouts.utccp_scales(rows[:, :96])


def test_fused_weights_keep_the_layout_of_memory() -> None:
    """MN-major scales stay MN-major, and every row keeps its codes and scales together."""
    weight = torch.randn(2, 256, 128, generator=torch.Generator().manual_seed(4))
    down = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(5))
    packed = [layouts.pack_experts(b.codes, b.scales) for b in map(quantise_q4x, (weight, down))]
    first, second = layouts.mega_moe_weights(*packed)
    assert first[1].stride() == packed[0][1].stride() == (256, 1, 256)
    assert torch.equal(second[0], packed[1][0])
    for place in range(256):
        turn, inside = place // 16, place % 16
        row = 8 * turn + inside if inside < 8 else 128 + 8 * turn + inside - 8
        assert torch.equal(first[0][:, place], packed[0][0][:, row])
        start, rest = place // 128 * 128, place % 128
        at = start + 4 * (rest % 32) + rest // 32
        assert torch.equal(first[1][:, at], packed[0][1][:, row])


def test_expert_ends() -> None:
    """Each expert starts at a multiple of the alignment, right behind the one before it."""
    counts = [3, 0, 8, 1, 0]
    ends = layouts.expert_ends(torch.tensor(counts, dtype=torch.int32), 8).tolist()
    start = 0
    for count, end in zip(counts, ends, strict=True):
        assert end == start + count
        start = -(-end // 8) * 8
    assert ends == [3, 8, 16, 17, 24]


def test_index_pages() -> None:
    """Per page all codes, then all scales."""
    records = random_scales(64, 68)
    pages = layouts.split_index_pages(records, 32)
    assert pages.shape == (2, 32, 1, 68)
    for page in range(2):
        raw = pages[page].flatten().tolist()
        for entry in range(32):
            row = records[32 * page + entry].tolist()
            assert raw[64 * entry : 64 * entry + 64] == row[:64]
            assert raw[32 * 64 + 4 * entry : 32 * 64 + 4 * entry + 4] == row[64:]
    with pytest.raises(ValueError, match="64 rows are not whole pages of 48"):
        layouts.split_index_pages(records, 48)


def test_row_major_words() -> None:
    """The fused MoE kernel's activations: words of a row stand side by side."""
    scales = random_scales(3, 8)
    words = layouts.scale_words(scales)
    assert words.shape == (3, 2) and words.stride() == (2, 1)
    assert storage_bytes(words) == bytes(scales.flatten().tolist())
