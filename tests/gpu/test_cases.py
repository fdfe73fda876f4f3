"""The cases of values that a card is asked: one for every kernel, and right by other routes."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.regions_metadata import TOKEN_OUTS, metadata_regions
from decodegrid.graphs.regions_verify import verify_regions
from decodegrid.graphs.state import Capacity, compressor_ring_len, window_ring_len
from decodegrid.kernels.indexer import top_k_mask
from decodegrid.kernels.providers.tile_ops import tile_op
from decodegrid.kernels.tile.table import OPS, TileKernel, find_op, kernels
from tests.gpu.case_form import Case, compare
from tests.gpu.cases import CASES
from tests.gpu.cases_products import MARKED
from tests.gpu.cases_step import OUTPUTS
from tests.gpu.scene import ROOT, read_config

KERNELS = kernels()
GIGABYTES = {k.name for k in KERNELS if k.op == "grouped_fp4" and k.model == "flash"}
"""Kernels whose case is made on a machine with a card alone: stacks of 64 experts and more. The
same function makes the small ones."""
SMALL = [kernel for kernel in KERNELS if kernel.name not in GIGABYTES]
CONFIGS = {"tiny": "configs/tiny-v41/config.json", "flash": "tests/released_config.json"}


def make(kernel: TileKernel) -> Case:
    return CASES[kernel.op](kernel.sizes)


def of_op(op: str) -> list[TileKernel]:
    return [kernel for kernel in KERNELS if kernel.op == op]


def test_every_kernel_has_a_case() -> None:
    """At every size of the table."""
    assert set(CASES) == {op.name for op in OPS} == {kernel.op for kernel in KERNELS}
    assert {kernel.op for kernel in SMALL} == set(CASES)


@pytest.mark.parametrize("kernel", SMALL, ids=lambda kernel: kernel.name)
def test_a_case_expects_what_the_schema_writes(kernel: TileKernel) -> None:
    """All that is written and nothing else, and poison is not what is expected."""
    case, arguments = make(kernel), tile_op(kernel.op)._schema.arguments[1:]
    assert len(case.tensors) == len(arguments)
    written = {
        place
        for place, item in enumerate(arguments)
        if item.alias_info is not None and item.alias_info.is_write
    }
    assert set(case.expected) == written
    assert all(tensor.is_contiguous() for tensor in case.tensors)
    for place, want in case.expected.items():
        before = case.tensors[place]
        assert (before.shape, before.dtype) == (want.shape, want.dtype)
        assert not compare(replace(case, expected={place: want}), case.tensors).is_right


@pytest.fixture(params=of_op("decode_tokens"), ids=lambda kernel: kernel.name)
def tokens(request: pytest.FixtureRequest) -> tuple[TileKernel, Case]:
    return request.param, make(request.param)


def config_of(kernel: TileKernel) -> ModelConfig:
    return read_config(ROOT / CONFIGS[kernel.model])


def test_tokens_are_those_of_a_step(tokens: tuple[TileKernel, Case]) -> None:
    """The region of a decode step, whose own split is led to the case's lengths."""
    kernel, case = tokens
    sizes, config = kernel.sizes, config_of(kernel)
    drafts, block_size = int(sizes["num_drafts"]), int(sizes["block_size"])
    slots, lens, last, seq_len, history, offered, table, compressed = case.tensors[:8]
    assert window_ring_len(config, drafts) == sizes["ring"]
    assert compressor_ring_len(drafts) == sizes["compressor_ring"]
    assert config.engram_max_ngram_size == sizes["ngram"]
    assert (config.engram_pad_token_id, config.vocab_size) == (sizes["pad_id"], sizes["vocab"])
    num_drafts = torch.zeros(5, dtype=torch.int64)
    num_drafts[slots] = (lens - 1).clamp(min=0)
    capacity = Capacity(5, 40, block_size, 10 * block_size, drafts)
    outs: dict[str, Tensor] = {name: torch.full_like(lens, -9) for name in ("lens", "starts")}
    by_name = dict(zip(OUTPUTS, [case.expected[9 + i] for i in range(len(OUTPUTS))], strict=True))
    for name in TOKEN_OUTS:
        like = by_name.get(name, by_name["positions"])
        outs[name] = torch.full_like(like, 1)
    outs["window_index"] = outs["window_index"].new_zeros(len(like), config.sliding_window)
    metadata_regions(config, capacity)["decode_metadata"].function(
        slots, lens.sum().view(1), last, seq_len, history, torch.full_like(seq_len, 10**6),
        offered, num_drafts, torch.ones(5, drafts), table, compressed, *outs.values(),
    )  # fmt: skip
    assert torch.equal(outs["lens"], lens)
    assert torch.equal(outs["starts"], case.expected[8])
    for name in OUTPUTS:
        assert torch.equal(outs[name], by_name[name]), name


def test_tokens_cover_what_they_are_about(tokens: tuple[TileKernel, Case]) -> None:
    _, case = tokens
    valid, positions = case.expected[12], case.expected[10]
    assert 0 < int((~valid).sum()) == 3 and bool((positions[valid] == 0).any())
    assert bool((case.expected[17] > 0).any()) and bool((case.expected[18] > 0).any())


@pytest.mark.parametrize("kernel", of_op("accept"), ids=lambda kernel: kernel.name)
def test_acceptance_is_that_of_a_step(kernel: TileKernel) -> None:
    case = make(kernel)
    config = config_of(kernel)
    capacity = Capacity(9, 40, 16, 160, int(kernel.sizes["num_drafts"]))
    verify_regions(config, capacity)["accept"].function(*case.tensors)
    for place, want in case.expected.items():
        assert torch.equal(case.tensors[place], want), place
    emitted, stopped = case.expected[11], case.expected[12]
    # Prefixes of several lengths, pads, and both answers about a stop.
    assert len(emitted.unique()) >= 4 and int(emitted.min()) == 0
    assert bool(stopped.any()) and bool((~stopped & (emitted > 0)).any())


@pytest.mark.parametrize("kernel", of_op("select_threshold"), ids=lambda kernel: kernel.name)
def test_a_threshold_keeps_what_the_mask_keeps(kernel: TileKernel) -> None:
    case, k = make(kernel), int(kernel.sizes["k"])
    best, entries = case.tensors[:2]
    place = torch.arange(best.shape[1])
    inside = place < (entries // int(kernel.sizes["unit"])).unsqueeze(1)
    level, bound = case.expected[2].unsqueeze(1), case.expected[3].unsqueeze(1)
    kept = ((best > level) | ((best == level) & (place < bound))) & inside
    visible = best.where(inside, torch.tensor(-torch.inf))
    assert torch.equal(kept, top_k_mask(visible, k))


@pytest.mark.parametrize("kernel", of_op("mark_blocks"), ids=lambda kernel: kernel.name)
def test_marks_are_the_kept_blocks(kernel: TileKernel) -> None:
    """By the mask of scores; what is past a length is as it was."""
    case, block = make(kernel), int(kernel.sizes["block"])
    best, _, _, lengths, before = case.tensors
    inside = torch.arange(before.shape[1]) < lengths.unsqueeze(1)
    kept = top_k_mask(best.nan_to_num(-torch.inf), MARKED).repeat_interleave(block, 1)
    assert torch.equal(case.expected[4], kept.where(inside, before))
    assert bool((inside & ~kept).any()) and bool((inside & kept).any())


FLASH_ONLY = {kernel.op for kernel in KERNELS} - {k.op for k in KERNELS if k.model == "tiny"}
ON_THE_CPU = [
    kernel
    for kernel in SMALL
    if kernel.model == "tiny" or kernel.op in FLASH_ONLY or kernel.sizes.get("page", 0)
]


@pytest.fixture(scope="module")
def cpu_kernel() -> Callable[[TileKernel], Any]:
    """cpu_kernel(kernel): a call with all tensors, the same source compiled for the CPU."""
    path = ROOT / "tests" / "kernels" / "tile" / "cpu_route.py"
    spec = importlib.util.spec_from_file_location("tile_cpu_route", path)
    assert spec is not None and spec.loader is not None
    # Once a process: TileLang takes the rules of one such module alone.
    if spec.name not in sys.modules:
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    route = sys.modules[spec.name]
    folder = ROOT / "build" / "tile-cpu"
    return lambda kernel: route.compile_kernel(find_op(kernel.op).factory, kernel.sizes, folder)


@pytest.mark.kernels
@pytest.mark.parametrize("kernel", ON_THE_CPU, ids=lambda kernel: kernel.name)
def test_cases_hold_on_the_cpu(kernel: TileKernel, cpu_kernel: Any) -> None:
    """What a card will be asked, asked of the same sources' CPU form."""
    case = make(kernel)
    cpu_kernel(kernel)(*case.tensors)
    outcome = compare(case, case.tensors)
    assert outcome.is_right, outcome.worst
