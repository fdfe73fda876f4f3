"""Engram tables that stay in the checkpoint's files: mapped, not copied, and of the same values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decodegrid.graphs.checkpoint import load_model, save_model, save_quantised
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.packed_modules import PackedTable

MakeModel = Callable[..., DraftModel]
MakeRaw = Callable[..., dict[str, Any]]
WHOLE_BLOCKS = {"moe_intermediate_size": 32, "engram_head_dim": 32}


@pytest.fixture(scope="module")
def quantised(
    make_model: MakeModel, make_raw: MakeRaw, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A quantised checkpoint of the small model."""
    directory = tmp_path_factory.mktemp("quantised")
    model = make_model(dtype=torch.float32, **WHOLE_BLOCKS)
    save_quantised(model, directory, make_raw(**WHOLE_BLOCKS))
    return directory


def logits_of(model: DraftModel) -> Tensor:
    return model.logits(torch.arange(20) * 7 % 96)


def mapped_regions(path: Path) -> list[tuple[int, int]]:
    """Address ranges of this process that are mapped from a file."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path.resolve())):
            first, last = line.split(maxsplit=1)[0].split("-")
            found.append((int(first, 16), int(last, 16)))
    return found


def assert_mapped(tensor: Tensor, path: Path) -> None:
    start = tensor.data_ptr()
    stop = start + tensor.nbytes
    assert any(a <= start and stop <= b for a, b in mapped_regions(path)), path


@pytest.mark.parametrize("weights", ["expanded", "packed_experts", "packed"])
def test_mapped_tables_lie_in_the_file(quantised: Path, weights: Any) -> None:
    path = quantised / "model.safetensors"
    model = load_model(quantised, weights=weights, engram_tables="mapped")
    for layer in (1, 3):
        table = model.blocks[layer].engram.embed
        assert isinstance(table, PackedTable)
        assert_mapped(table.codes, path)
        assert_mapped(table.scales, path)
    assert torch.equal(logits_of(model), logits_of(load_model(quantised)))
    del model, table
    assert not mapped_regions(path), "the mapping goes with its last tensor"


def test_mapped_tables_of_floats(make_model: MakeModel, make_raw: MakeRaw, tmp_path: Path) -> None:
    save_model(make_model(dtype=torch.float32), tmp_path, torch.float32, make_raw())
    model = load_model(tmp_path, engram_tables="mapped")
    assert_mapped(model.blocks[1].engram.embed.weight, tmp_path / "model.safetensors")
    assert torch.equal(logits_of(model), logits_of(load_model(tmp_path)))
    with pytest.raises(ValueError, match=r"engram\.embed\.weight is stored as F32; .*bfloat16"):
        load_model(tmp_path, dtype=torch.bfloat16, engram_tables="mapped")
    with pytest.raises(ValueError, match="weights is 'packed', but the checkpoint is stored as fl"):
        load_model(tmp_path, weights="packed")
