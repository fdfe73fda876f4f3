"""The table of kernels, and (marker `cubins`) every cubin for both architectures."""

import json
import re
import shutil

import pytest
import torch

from decodegrid.kernels.tile.build import BuildError, build, main, require_tools
from decodegrid.kernels.tile.table import ARCHS, BLACKWELL, HOPPER, OPS, find_op, kernels

TENSOR_CORE = {
    HOPPER: re.compile(r"\bwgmma\.mma_async\b"),
    BLACKWELL: re.compile(r"\bmma\.sync\.aligned\.m16n8k16\b|\btcgen05\.mma\b"),
}


ON_THE_CPU_ALONE = {"filter_logits"}
"""Ops whose kernels are not built; `_built` of the providers must not offer them to a card."""


def test_every_op_is_built_for_both_models():
    assert {kernel.op for kernel in kernels() if not kernel.archs} == ON_THE_CPU_ALONE
    built = {(kernel.op, kernel.model) for kernel in kernels() if kernel.archs}
    names = {op.name for op in OPS} - ON_THE_CPU_ALONE
    assert {op for op, _ in built} == names
    shared_sizes = {"expand_ranges", "block_scores", "mark_blocks", "mask_scores", "sinkhorn",
                    "accept", "split_lengths", "store_hopper", "take_hopper"}
    assert {op for op, model in built if model == "tiny"} >= names - shared_sizes


def test_names_are_unique_and_schemas_parse():
    found = [kernel.name for kernel in kernels()]
    assert len(found) == len(set(found))
    library = torch.library.Library("tile_schema_test", "DEF")
    for op in OPS:
        library.define(f"{op.name}({op.schema}) -> ()")
    with pytest.raises(ValueError, match="no tile op 'casts'; there are cast_fp8"):
        find_op("casts")


@pytest.mark.kernels
def test_schema_is_the_kernels_signature():
    """Names and order of a schema are those of the kernel; what is written comes last but state."""
    from decodegrid.kernels.tile.lower import prim_func

    done = set()
    for kernel in kernels():
        if kernel.op in done:
            continue
        done.add(kernel.op)
        function = prim_func(kernel)
        names = [str(function.buffer_map[handle].name) for handle in function.params]
        schema = find_op(kernel.op).schema
        assert [part.split()[-1] for part in schema.split(", ")] == names, kernel.op


def test_missing_tools_are_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match="nvcc"):
        require_tools()
    assert main(["--out", str(tmp_path), "--op", "sinkhorn"]) == 2
    assert "nvcc" in capsys.readouterr().err
    assert main(["--op", "nothing"]) == 2
    assert "no kernel of nothing" in capsys.readouterr().err
    assert main(["--op", "filter_logits"]) == 2
    assert "no kernel of filter_logits" in capsys.readouterr().err


@pytest.mark.cubins
@pytest.mark.parametrize("arch", ARCHS)
def test_all_cubins(arch, request):
    """Every kernel becomes a cubin; the products use tensor cores; a second build makes nothing."""
    out = request.config.rootpath / "build" / "cubins"
    built = build(out, arch, kernels(), keep_ptx=True)
    assert [item.kernel.name for item in built] == [
        kernel.name for kernel in kernels() if arch in kernel.archs
    ]
    manifest = json.loads((out / arch / "manifest.json").read_text())
    for item in built:
        facts = manifest["kernels"][item.kernel.name]
        image = (out / arch / facts["cubin"]).read_bytes()
        assert image[:4] == b"\x7fELF" and facts["entry"].encode() in image
        uses = bool(TENSOR_CORE[arch].search(item.cubin.with_suffix(".ptx").read_text()))
        assert uses == find_op(item.kernel.op).uses_tensor_cores, item.kernel.name
        assert facts["shared_bytes"] <= 227 * 1024, item.kernel.name
    assert not any(item.is_new for item in build(out, arch, kernels(), keep_ptx=True))
