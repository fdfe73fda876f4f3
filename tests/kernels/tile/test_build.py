"""The table of kernels, and (marker `cubins`) every cubin for both architectures."""

import json
import os
import re
import shutil

import pytest
import torch

from decodegrid.kernels.tile.build import BuildError, build, main, require_tools
from decodegrid.kernels.tile.launch import Launch, Lowered
from decodegrid.kernels.tile.table import ARCHS, BLACKWELL, HOPPER, OPS, find_op, kernels

# What multiplies on tensor cores: Hopper's warp groups, and warps on either.
TENSOR_CORE = {HOPPER: re.compile(r"HGMMA\."), BLACKWELL: re.compile(r"HMMA\.16816\.F32\.BF16")}
ANY_TENSOR_CORE = re.compile(r"[A-Z]*MMA\b")
LISTING = """
\t\tFunction : product
        /*0000*/                   LDC R1, c[0x0][0x28] ;     /* 0x00000a00ff017b82 */
                                                              /* 0x000fe20000000800 */
        /*0010*/              @!P0 HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ; /* 0x0 */
        /*0020*/              @UP1 UIADD3 UR4, UR4, 0x1, URZ ; /* 0x0 */
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ; /* 0x0 */
\t\tFunction : sum
        /*0000*/                   FADD R1, R1, R2 ;          /* 0x0 */
"""
"""Lines as cuobjdump prints them, of two functions that do not exist."""


def test_every_op_is_built_for_both_models():
    assert all(kernel.archs for kernel in kernels())
    built = {(kernel.op, kernel.model) for kernel in kernels()}
    names = {op.name for op in OPS}
    assert {op for op, _ in built} == names
    shared_sizes = {"expand_ranges", "block_scores", "mark_blocks", "mask_scores", "sinkhorn",
                    "accept", "split_lengths", "store_hopper", "take_hopper"}
    assert {op for op, model in built if model == "tiny"} >= names - shared_sizes
    for_hopper_alone = {kernel.op for kernel in kernels() if kernel.archs == (HOPPER,)}
    assert for_hopper_alone == {"cast_fp8_columns", "store_hopper", "take_hopper", "sparse_mla",
                                "sparse_mla_window", "grouped_fp4"}


def test_entries_of_kernels_are_unique():
    """Kernels that share a cubin are told apart by their entries."""
    entries = {re.sub(r"\W", "_", kernel.name) for kernel in kernels()}
    assert len(entries) == len(kernels())


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
    assert main(["--jobs", "0"]) == 2
    assert "--jobs 0; at least 1" in capsys.readouterr().err


def test_what_was_lowered_comes_back_from_its_file(tmp_path):
    """A warm build reads it: every field and the order of arguments."""
    tensors = [{"name": "x", "dtype": "float32", "shape": ["n", 4]}]
    launch = Launch("sum_4", tensors, ["x", "n"], ["(n + 3) // 4", "1", "1"], [128, 1, 1], 64)
    lowered = Lowered("extern ...", launch)
    assert Lowered.from_json(json.loads(json.dumps(lowered.as_json()))) == lowered


def test_machine_code_is_counted_by_function(machine_code):
    assert machine_code.parse(LISTING) == {
        "product": {"LDC": 1, "HGMMA.64x64x16.F32.BF16": 2, "UIADD3": 1}, "sum": {"FADD": 1}
    }


@pytest.mark.cubins
def test_all_cubins(request, machine_code):
    """Every kernel becomes machine code; the products, and they alone, use tensor cores; a second
    build makes nothing."""
    out, made = request.config.rootpath / "build" / "cubins", []
    jobs = os.cpu_count() or 1
    everything = build(out, ARCHS, kernels(), jobs=jobs)
    for arch, built in everything.items():
        names = sorted(kernel.name for kernel in kernels() if arch in kernel.archs)
        assert sorted(item.kernel.name for item in built) == names
        manifest = json.loads((out / arch / "manifest.json").read_text())
        code = {cubin: machine_code.opcodes(cubin) for cubin in {item.cubin for item in built}}
        for item in built:
            facts = manifest["kernels"][item.kernel.name]
            assert out / arch / facts["cubin"] == item.cubin
            assert facts["shared_bytes"] <= 227 * 1024, item.kernel.name
            found = code[item.cubin][facts["entry"]]
            if find_op(item.kernel.op).uses_tensor_cores:
                assert any(map(TENSOR_CORE[arch].match, found)), (item.kernel.name, found)
            else:
                assert found.total() > 10, item.kernel.name
                assert not any(map(ANY_TENSOR_CORE.match, found)), (item.kernel.name, found)
    again = build(out, ARCHS, kernels(), report=lambda name, seconds: made.append(name))
    assert not made and again == everything
