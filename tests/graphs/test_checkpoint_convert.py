"""Conversion between floats and the quantised format: values, report, and what a failure leaves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decodegrid.graphs import checkpoint_convert
from decodegrid.graphs.checkpoint import load_model, save_model, save_quantised
from decodegrid.graphs.checkpoint_convert import KindReport, convert_checkpoint
from decodegrid.graphs.checkpoint_names import CheckpointError, tensor_slots
from decodegrid.graphs.drafter import DraftModel

WEIGHTS = "model.safetensors"
MakeModel = Callable[..., DraftModel]
MakeRaw = Callable[..., dict[str, Any]]
WHOLE_BLOCKS = {"moe_intermediate_size": 32, "engram_head_dim": 32}


@pytest.fixture(scope="module")
def model(make_model: MakeModel) -> DraftModel:
    return make_model(seed=9, dtype=torch.float32, **WHOLE_BLOCKS)


@pytest.fixture(scope="module")
def floats(model: DraftModel, make_raw: MakeRaw, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint in shards, with image tensors and other files."""
    directory = tmp_path_factory.mktemp("floats")
    raw = make_raw(**WHOLE_BLOCKS)
    save_model(model, directory, torch.float32, raw, max_shard_bytes=300_000)
    shard = sorted(directory.glob("model-*.safetensors"))[-1]
    tensors = load_file(shard) | {"aligner.w1.bias": torch.full((5,), 0.5, dtype=torch.bfloat16)}
    save_file(tensors, shard)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"]["aligner.w1.bias"] = shard.name
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "generation_config.json").write_text('{"top_p": 0.95}')
    return directory


def values(directory: Path) -> dict[str, torch.Tensor]:
    loaded = load_model(directory, dtype=torch.float64)
    return {slot.name: slot.target for slot in tensor_slots(loaded)}


def assert_same_values(first: Path, second: Path) -> None:
    found, wanted = values(first), values(second)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_there_and_back_and_there_again(
    model: DraftModel, make_raw: MakeRaw, floats: Path, tmp_path: Path
) -> None:
    """The quantised copy is what saving the model quantised gives; nothing is lost after that."""
    quantised = tmp_path / "q"
    convert_checkpoint(floats, quantised)
    save_quantised(model, tmp_path / "direct", make_raw(**WHOLE_BLOCKS))
    converted, direct = load_file(quantised / WEIGHTS), load_file(tmp_path / "direct" / WEIGHTS)
    assert torch.equal(converted.pop("aligner.w1.bias"), torch.full((5,), 0.5).bfloat16())
    assert converted.keys() == direct.keys()
    for name, tensor in direct.items():
        found = converted[name]
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name
    for form in ("bf16", "f32"):
        back = tmp_path / form
        convert_checkpoint(quantised, back, form)  # type: ignore[arg-type]
        raw = json.loads((back / "config.json").read_text())
        assert "quantization_config" not in raw
        assert raw["dtype"] == {"bf16": "bfloat16", "f32": "float32"}[form]
        assert (back / "generation_config.json").read_text() == '{"top_p": 0.95}'
        assert_same_values(back, quantised)
        convert_checkpoint(back, tmp_path / f"{form}-q", "fp8", max_shard_bytes=50_000)
        assert len(list((tmp_path / f"{form}-q").glob("model-*.safetensors"))) > 3
        assert_same_values(tmp_path / f"{form}-q", quantised)


def test_the_report(floats: Path, tmp_path: Path) -> None:
    reports = {report.kind: report for report in convert_checkpoint(floats, tmp_path / "q")}
    wanted, found = values(floats), values(tmp_path / "q")
    stored = load_file(tmp_path / "q" / WEIGHTS)
    experts = [name for name in wanted if ".experts." in name]
    tables = [name for name in wanted if name.endswith("engram.embed.weight")]
    for kind, names in (("mxfp4", experts), ("fp8 rows", tables)):
        report = reports[kind]
        assert report.tensors == len(names)
        assert report.bytes_before == sum(4 * wanted[name].numel() for name in names)
        scales = [name.removesuffix("weight") + "scale" for name in names]
        assert report.bytes_after == sum(stored[name].nbytes for name in (*names, *scales))
        change = torch.cat([(found[name] - wanted[name]).flatten() for name in names])
        value = torch.cat([wanted[name].flatten() for name in names])
        assert report.max_error == pytest.approx(float(change.abs().max()), rel=1e-12)
        wanted_rms = float(change.square().sum().sqrt() / value.square().sum().sqrt())
        assert report.relative_rms_error == pytest.approx(wanted_rms, rel=1e-9)
    assert 0.05 < reports["mxfp4"].relative_rms_error < 0.15
    assert 0.01 < reports["fp8 32x32"].relative_rms_error < 0.04
    assert 0 < reports["float"].relative_rms_error < 0.003
    assert reports["wide float"].max_error == 0
    assert reports["image path, copied"].tensors == 1
    assert sum(report.tensors for report in reports.values()) == len(wanted) + 1
    back = convert_checkpoint(tmp_path / "q", tmp_path / "b")
    assert all(report.max_error == 0 for report in back)


def test_an_empty_report_has_no_error() -> None:
    report = KindReport("float")
    report.compare(torch.empty(0, 4), torch.empty(0, 4))
    assert report.max_error == 0 and report.relative_rms_error == 0


def test_what_is_refused(floats: Path, tmp_path: Path, make_raw: MakeRaw) -> None:
    quantised = tmp_path / "q"
    with pytest.raises(ValueError, match="is stored as f32 already"):
        convert_checkpoint(floats, quantised, "f32")
    with pytest.raises(ValueError, match="to is 'int8'; must be fp8, bf16 or f32"):
        convert_checkpoint(floats, quantised, "int8")  # type: ignore[arg-type]
    quantised.mkdir()
    convert_checkpoint(floats, quantised)  # an empty directory will do
    with pytest.raises(ValueError, match="is stored as fp8 already"):
        convert_checkpoint(quantised, tmp_path / "x", "fp8")
    with pytest.raises(ValueError, match=r"q is not empty"):
        convert_checkpoint(floats, quantised)
    with pytest.raises(ValueError, match="is both source and target"):
        convert_checkpoint(quantised, tmp_path / "q" / ".." / "q")
    with pytest.raises(ValueError, match=r"config\.json exists and is not a directory"):
        convert_checkpoint(floats, quantised / "config.json")
    with pytest.raises(ValueError, match="there is no directory"):
        convert_checkpoint(floats, tmp_path / "a" / "b")
    with pytest.raises(CheckpointError, match="no such checkpoint directory"):
        convert_checkpoint(tmp_path / "absent", tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q"]


def test_sizes_that_the_format_cannot_hold(
    make_model: MakeModel, make_raw: MakeRaw, tmp_path: Path
) -> None:
    plain = make_model(dtype=torch.float32)
    save_model(plain, tmp_path / "f", torch.float32, make_raw())
    message = "moe_intermediate_size is 16; must be a multiple of 32"
    with pytest.raises(ValueError, match=rf"cannot be stored as fp8: .*{message}"):
        convert_checkpoint(tmp_path / "f", tmp_path / "q")
    with pytest.raises(ValueError, match=message):
        save_quantised(plain, tmp_path / "q", make_raw())
    assert not (tmp_path / "q").exists()


def test_values_that_are_not_finite(
    make_model: MakeModel, make_raw: MakeRaw, tmp_path: Path
) -> None:
    broken, raw = make_model(dtype=torch.float32, **WHOLE_BLOCKS), make_raw(**WHOLE_BLOCKS)
    broken.blocks[2].ffn.experts.w1[5, 3, 3] = float("nan")
    save_model(broken, tmp_path / "f", torch.float32, raw)
    message = r"tensor layers\.2\.ffn\.experts\.5\.w1\.weight: a value is not a finite float32"
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS}: {message}"):
        convert_checkpoint(tmp_path / "f", tmp_path / "q")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    with pytest.raises(ValueError, match=message):
        save_quantised(broken, tmp_path / "q", raw)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_failure_leaves_nothing(
    floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Until the end there is no target, only a hidden directory, which a failure takes along."""
    write = checkpoint_convert.write_tensors
    seen = []

    def fails_late(directory: Path, *arguments: Any) -> None:
        write(directory, *arguments)
        seen.extend(path.name for path in tmp_path.iterdir())
        raise error("stopped")

    monkeypatch.setattr(checkpoint_convert, "write_tensors", fails_late)
    with pytest.raises(error):
        convert_checkpoint(floats, tmp_path / "q")
    assert len(seen) == 1 and seen[0].startswith(".q.part-")
    assert not list(tmp_path.iterdir())
