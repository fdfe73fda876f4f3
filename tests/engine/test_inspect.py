"""`decodegrid inspect`: the released model from headers alone, findings, and errors."""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from decodegrid.configs.load import CONFIGS_DIR
from decodegrid.engine.cli import main
from decodegrid.engine.cli_inspect import format_report, make_report
from decodegrid.graphs.checkpoint import save_model
from decodegrid.graphs.checkpoint_inventory import (
    StoredSpec,
    count_parameters,
    num_tensors_bound,
    read_vision_config,
    released_tensors,
)
from decodegrid.graphs.checkpoint_names import CheckpointError, tensor_slots
from decodegrid.graphs.checkpoint_survey import survey_checkpoint
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model_config import parse_model_config
from decodegrid.graphs.safetensors_header import read_file_header

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ITEM = {"BF16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
MakeRaw = Callable[..., dict[str, Any]]

PUBLISHED = {
    "BF16": 1_976_441_856,
    "F32": 42_307_282,
    "F8_E4M3": 204_015_223_296,
    "F8_E8M0": 23_563_015_184,
    "I8": 278_585_671_680,
}
"""Elements by dtype in the released checkpoint."""


def specs_of(raw: dict[str, Any]) -> list[StoredSpec]:
    return list(released_tensors(parse_model_config(raw), read_vision_config(raw)))


def test_the_inventory_is_the_published_one(released_raw: dict[str, Any]) -> None:
    specs = specs_of(released_raw)
    assert len(specs) == len({spec.name for spec in specs}) == 96_085
    elements: Counter[str] = Counter()
    for spec in specs:
        elements[spec.dtype] += math.prod(spec.shape)
    assert elements == PUBLISHED
    assert sum(ITEM[dtype] * count for dtype, count in elements.items()) == 510_286_023_000
    by_name = {spec.name: (spec.dtype, list(spec.shape)) for spec in specs}
    wanted = {
        "layers.0.attn.wo_a.weight": ("F8_E4M3", [8192, 4096]),
        "layers.0.attn.wo_a.scale": ("F8_E8M0", [256, 128]),
        "layers.14.engram.embed.weight": ("F8_E4M3", [384016682, 256]),
        "layers.14.engram.embed.scale": ("F8_E8M0", [384016682, 8]),
        "layers.1.engram.wkv.weight": ("F8_E4M3", [25600, 6144]),
        "layers.36.attn.indexer.wq_b.scale": ("F8_E8M0", [128, 40]),
        "layers.39.ffn.experts.383.w2.weight": ("I8", [5120, 1152]),
        "layers.39.ffn.experts.383.w2.scale": ("F8_E8M0", [5120, 72]),
        "mtp.2.ffn.experts.127.w1.weight": ("I8", [2304, 2560]),
        "mtp.0.main_proj.weight": ("F8_E4M3", [5120, 15360]),
        "mtp.2.confidence_head.proj.weight": ("BF16", [1, 5376]),
        "layers.7.hc_ffn_fn": ("F32", [24, 20480]),
        "aligner.w1.weight": ("BF16", [5120, 9216]),
        "aligner.w1.bias": ("BF16", [5120]),
        "vision.patch_embed.proj.weight": ("BF16", [1024, 588]),
        "vision.blocks.31.mlp.w1.weight": ("BF16", [5632, 1024]),
    }
    for name, found in wanted.items():
        assert by_name[name] == found, name
    assert not {"layers.20.attn.compressor.wgate.weight", "mtp.0.norm.weight"} & set(by_name)
    config = parse_model_config(released_raw)
    assert len(specs) <= num_tensors_bound(config, read_vision_config(released_raw)) < 110_000


def test_parameters_of_the_released_model(released_raw: dict[str, Any]) -> None:
    counts = count_parameters(parse_model_config(released_raw), read_vision_config(released_raw))
    assert counts.total == sum(PUBLISHED.values()) - PUBLISHED["F8_E8M0"] + PUBLISHED["I8"]
    assert counts.engram == 256 * (384_006_168 + 384_016_682)
    assert counts.experts == 40 * 384 * 3 * 5120 * 2304
    assert round(counts.drafter / 1e9, 1) == 14.2
    assert round(counts.active / 1e9, 1) == 16.1


SMALL_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {
        "n_routed_experts": 5,
        "num_nextn_predict_layers": 1,
        "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0],
    },
    {
        "num_hidden_layers": 1,
        "compress_ratios": [0],
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": None,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "num_nextn_predict_layers": 0,
    },
)


@pytest.mark.parametrize("changes", SMALL_CHANGES)
def test_the_inventory_names_what_the_model_has(make_raw: MakeRaw, changes: dict[str, Any]) -> None:
    config = parse_model_config(make_raw(**changes))
    with torch.device("meta"):
        slots = tensor_slots(DraftModel(config))
    wanted = {slot.name: (tuple(slot.target.shape), slot.is_wide) for slot in slots}
    found = {
        spec.name: (spec.shape, "BF16" not in spec.allowed)
        for spec in released_tensors(config, None)
    }
    assert found == wanted
    assert count_parameters(config, None).total == sum(math.prod(s) for s, _ in wanted.values())


def write_headers(path: Path, specs: Iterable[StoredSpec]) -> int:
    """A safetensors file of `specs` without its data; returns the bytes that are left out."""
    header, end = {}, 0
    for spec in specs:
        begin, end = end, end + math.prod(spec.shape) * ITEM[spec.dtype]
        offsets = [begin, end]
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return end


def write_shards(directory: Path, raw: dict[str, Any], num_shards: int) -> None:
    """A header-only copy of a checkpoint: config.json, index and shards."""
    specs = specs_of(raw)
    size = -(-len(specs) // num_shards)
    placed = {}
    for number in range(num_shards):
        part = specs[number * size : (number + 1) * size]
        name = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        write_headers(directory / name, part)
        placed.update({spec.name: name for spec in part})
    (directory / "config.json").write_text(json.dumps(raw))
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*argv: object) -> tuple[int, str, str]:
        status = main(["inspect", *map(str, argv)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_header_only_copy_of_the_released_model(
    released_raw: dict[str, Any], tmp_path: Path, call: Any
) -> None:
    write_shards(tmp_path, released_raw, 48)
    status, out, err = call(tmp_path, "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["findings"] == []
    assert report["elements_by_dtype"] == PUBLISHED
    assert report["weight_bytes"] == sum(report["bytes_by_part"].values()) == 510_286_023_000
    assert (report["data"], report["present_bytes"]) == ("headers only", 0)

    out = "\n".join(format_report(report))
    assert "DeepseekV41ForCausalLM (deepseek_v41), quantised weights" in out
    assert "48 files, 96,085 tensors, 510,286,023,000 bytes (510.3 GB)" in out
    assert "no tensor data behind the headers" in out
    assert "every tensor that config.json asks for is there" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for wanted in (
        "window only 2 0-1",
        "full source 4 2, 8, 14, 20 (20 names the candidate blocks)",
        "reuse 30 3-7, 9-13, 15-19, 21-23, 25-27, 29-31, 33-35, 37-39",
        "reindex 4 24, 28, 32, 36",
        "drafter 3 mtp.0-2",
        "v41 (records) 890 bytes a token, 3,128,928 a request with 5 drafts, 1,415,040 of it for a "
        "prefix store",
        "F8_E4M3 204,015,223,296",
        "BF16 3,952,883,712",
        f"engram tables {(384_006_168 + 384_016_682) * 264:,}",
        # 510.286 GB over 0.9 * 80, and what the tables leave of it.
        f"8 x H100 80 GB {int((8 * 72e9 - 510_286_023_000) / 890):,} tokens",
        "2 x B200 180 GB "
        f"{int((2 * 162e9 - 510_286_023_000 + 768_022_850 * 264) / 890):,} tokens, engram tables "
        "in host memory",
    ):
        assert wanted in lines, f"{wanted!r} is not in\n{out}"


def test_an_index_without_its_files(quantised: dict[str, Any], tmp_path: Path, call: Any) -> None:
    write_shards(tmp_path, quantised, 2)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    status, out, _ = call(tmp_path)
    assert status == 0
    assert "shapes and dtypes are assumed from config.json" in out
    specs = specs_of(quantised)
    num_bytes = sum(math.prod(spec.shape) * ITEM[spec.dtype] for spec in specs)
    assert f"2 files, {len(specs):,} tensors, {num_bytes:,} bytes" in out
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"]["layers.3.attn.wkv.scale"]
    index["weight_map"]["layers.3.attn.wkv.bias"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    status, out, _ = call(tmp_path)
    assert status == 1
    assert "! tensors are missing: 1 (layers.3.attn.wkv.scale)\n" in out
    assert "! tensors are unexpected: 1 (layers.3.attn.wkv.bias)\n" in out


@pytest.fixture
def quantised(tiny_raw: dict[str, Any], released_raw: dict[str, Any]) -> dict[str, Any]:
    """config.json of the 12-layer model, quantised and with the released image path."""
    others = ("dtype", "quantization_config", "vision_config")
    return {**tiny_raw, **{name: released_raw[name] for name in others}}


def findings(directory: Path) -> dict[str, tuple[int, tuple[str, ...]]]:
    found = survey_checkpoint(directory).findings
    return {finding.what: (finding.count, finding.examples) for finding in found}


def test_findings_name_the_first_few(quantised: dict[str, Any], tmp_path: Path, call: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    specs = {spec.name: spec for spec in specs_of(quantised)}
    write_headers(tmp_path / WEIGHTS, specs.values())
    assert findings(tmp_path) == {}
    lost = [name for name in specs if name.startswith("layers.2.ffn.experts.")]
    for name in lost:
        del specs[name]
    name = "layers.3.attn.wq_a.weight"
    specs[name] = StoredSpec(name, "BF16", (65, 192), ())
    specs["norm.weight"] = StoredSpec("norm.weight", "F32", (191,), ())
    specs["layers.0.hc_attn_fn"] = StoredSpec("layers.0.hc_attn_fn", "BF16", (24, 768), ())
    specs["model.extra"] = StoredSpec("model.extra", "F32", (), ())
    write_headers(tmp_path / WEIGHTS, specs.values())
    assert findings(tmp_path) == {
        "tensors are missing": (16 * 6, tuple(lost[:3])),
        "tensors are unexpected": (1, ("extra",)),
        "tensors have a wrong shape": (
            2,
            (f"{name} [65, 192], not [64, 192]", "norm.weight [191], not [192]"),
        ),
        "tensors have a wrong dtype": (
            2,
            ("layers.0.hc_attn_fn BF16, not F32 or F64", f"{name} BF16, not F8_E4M3"),
        ),
    }
    status, out, _ = call(tmp_path)
    assert status == 1
    assert f"! tensors are missing: 96 ({'; '.join(lost[:3])}; 93 more)\n" in out
    status, out, _ = call(tmp_path, "--json")
    assert status == 1 and json.loads(out)["findings"][0]["count"] == 96


def test_the_image_path_is_whole_or_absent(quantised: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    images = ("vision.", "aligner.", "image_")
    text = [spec for spec in specs_of(quantised) if not spec.name.startswith(images)]
    write_headers(tmp_path / WEIGHTS, text)
    survey = survey_checkpoint(tmp_path)
    assert survey.findings == () and survey.vision is None
    assert make_report(survey)["parameters"]["vision"] == 0
    start = StoredSpec("image_start", "BF16", (192,), ())
    write_headers(tmp_path / WEIGHTS, [*text, start])
    assert findings(tmp_path)["tensors are missing"][0] == 2 + 2 + 32 * 8 + 1 + 4
    quantised.pop("vision_config")
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    assert findings(tmp_path) == {}  # nothing says what the image path should be


def test_shards(quantised: dict[str, Any], tmp_path: Path) -> None:
    write_shards(tmp_path, quantised, 3)
    assert findings(tmp_path) == {}
    first, second, third = sorted(tmp_path.glob("*.safetensors"))
    third.unlink()
    assert findings(tmp_path) == {"files that the index lists are missing": (1, (third.name,))}
    specs = specs_of(quantised)
    write_headers(third, specs[-5:])
    found = findings(tmp_path)
    kept = {spec.name for spec in specs[-5:]}
    placed = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    lost = [name for name, file in placed.items() if file == third.name and name not in kept]
    what = "tensors are not where the index places them"
    assert found[what] == (len(lost), tuple(f"{name} in {third.name}" for name in lost[:3]))
    assert found["tensors are missing"][0] == len(lost)
    write_headers(third, [*specs[:2], *specs[-5:]])
    assert findings(tmp_path)["tensors are stored twice"] == (2, (specs[0].name, specs[1].name))
    write_headers(third, specs[-5:])
    with second.open("ab") as file:
        file.truncate(second.stat().st_size + read_file_header(second).wanted_bytes)
    found = findings(tmp_path)
    assert found["files end with their header"] == (2, (first.name, third.name))


def test_a_real_checkpoint(
    make_model: Callable[..., Any], make_raw: MakeRaw, tmp_path: Path
) -> None:
    model = make_model(dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        save_model(model, tmp_path, dtype, make_raw())
        survey = survey_checkpoint(tmp_path)
        assert survey.findings == () and survey.data == "whole"
        assert survey.present_bytes == survey.sums.total
        total = sum(parameter.numel() for parameter in model.parameters())
        assert sum(survey.sums.elements.values()) == total
        assert count_parameters(survey.config, None).total == total
    path = tmp_path / WEIGHTS
    whole = path.stat().st_size
    present = survey.sums.total
    for size, shown in ((whole - 1, present - 1), (whole + 3, present + 3)):
        os.truncate(path, size)
        example = f"{WEIGHTS} ({shown:,} of {present:,} bytes)"
        assert findings(tmp_path) == {
            "files have another length than their headers say": (1, (example,))
        }
    caches = make_report(survey)["caches"]
    assert "error" in caches[1] and "head_dim" in caches[1]["error"]  # 16 channels are no block


def test_the_embedded_model(call: Any) -> None:
    status, out, err = call("tiny")
    assert (status, err) == (0, "") and call(CONFIGS_DIR / "tiny") == (0, out, "")
    assert "float weights" in out and "1 file, " in out


def broken(directory: Path, change: Callable[[Path], object]) -> str:
    """The one message that `change` of a good directory leads to."""
    change(directory)
    with pytest.raises(CheckpointError) as caught:
        survey_checkpoint(directory)
    return str(caught.value)


def test_what_is_no_checkpoint(
    quantised: dict[str, Any], tmp_path: Path, call: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call(tmp_path / "gone")
    wanted = f"decodegrid: error: {tmp_path}/gone: no such checkpoint directory\n"
    assert (status, out, err) == (2, "", wanted)
    assert call(tmp_path)[2] == f"decodegrid: error: {tmp_path}/config.json: no such file\n"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(quantised))
    status, _, err = call(tmp_path)
    assert status == 2
    assert f"{tmp_path}: not a checkpoint: has neither {WEIGHTS} nor {INDEX}" in err
    assert main(["inspect"]) == 2
    assert "DIR" in capsys.readouterr().err


def test_errors_of_config_and_index(quantised: dict[str, Any], tmp_path: Path) -> None:
    write_shards(tmp_path, quantised, 2)
    config, index = tmp_path / "config.json", tmp_path / INDEX
    good = config.read_text(), index.read_text()

    def config_error(text: str) -> str:
        return broken(tmp_path, lambda _: config.write_text(text))

    assert f"{config}: not valid JSON" in config_error("{")
    changed = {**quantised, "text_config": {**quantised["text_config"], "head_dim": 0}}
    assert "text_config.head_dim is 0; must be above 0" in config_error(json.dumps(changed))
    changed["text_config"] = {**quantised["text_config"], "n_routed_experts": 2**30}
    assert f"{config}: asks for up to" in config_error(json.dumps(changed))
    changed = {**quantised, "vision_config": {"hidden_size": 8}}
    assert "vision_config.num_hidden_layers is missing" in config_error(json.dumps(changed))
    changed = {**quantised, "vision_config": [1]}
    assert "vision_config is [1]; must be an object" in config_error(json.dumps(changed))
    config.write_text(good[0])

    for text, message in (
        ("[", f"{index}: not valid JSON"),
        ("{}", f"{index}: weight_map must be a non-empty object"),
        ('{"weight_map": {"norm.weight": "../x"}}', "places norm.weight in '../x', not a file"),
        ('{"weight_map": {"norm.weight": 5}}', "places norm.weight in 5, not a file name"),
    ):
        assert message in broken(tmp_path, lambda _, text=text: index.write_text(text))
    index.write_text(good[1])
    write_headers(tmp_path / WEIGHTS, [])
    assert "has both" in broken(tmp_path, lambda _: None)


def framed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def entry(text: str) -> bytes:
    """A file whose header has one tensor, a."""
    return framed(('{"a": ' + text + "}").encode())


HEADERS = (
    (b"", "has 0 bytes"),
    (b"\1\0\0", "has 3 bytes"),
    (
        (10**9).to_bytes(8, "little") + b"{}",
        "the header's length is 1000000000 bytes; the file has",
    ),
    ((2**64 - 1).to_bytes(8, "little") + b"{}", "the header's length is 18446744073709551615"),
    (framed(b"{"), "the header is not valid JSON"),
    (framed(b"\xff\xfe"), "the header is not valid JSON"),
    (framed(b"[" * 100_000), "the header is not valid JSON"),
    (framed(b"[]"), "the header must hold a JSON object"),
    (framed(b'{"a": {}, "a": {}}'), "the key 'a' is there twice"),
    (entry("1"), "tensor a: the header entry must be a JSON object"),
    (entry('{"dtype": "F33"}'), "tensor a: dtype is 'F33'; known are"),
    (entry('{"dtype": "F32", "shape": [-1]}'), "tensor a: shape is [-1]"),
    (entry('{"dtype": "F32", "shape": [2.0]}'), "tensor a: shape is [2.0]"),
    (entry('{"dtype": "F32", "shape": [true]}'), "tensor a: shape is [True]"),
    (entry('{"dtype": "F32", "shape": [2], "data_offsets": [0]}'), "data_offsets is [0]"),
    (
        entry('{"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}'),
        "data_offsets [0, 7] span 7 bytes; F32 [2] takes 8",
    ),
    (
        entry('{"dtype": "U8", "shape": [2], "data_offsets": [3, 5]}'),
        "tensor a begins at byte 3 of the data; the one before it ends at 0",
    ),
)


@pytest.mark.parametrize(("data", "message"), HEADERS)
def test_broken_headers(
    quantised: dict[str, Any], tmp_path: Path, call: Any, data: bytes, message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    path = tmp_path / WEIGHTS
    path.write_bytes(data)
    status, out, err = call(tmp_path)
    assert (status, out) == (2, "")
    assert err.startswith(f"decodegrid: error: {path}: ") and message in err
    assert err.count("\n") == 1


def test_any_flipped_header_bit_is_an_error_or_a_finding(make_raw: MakeRaw, tmp_path: Path) -> None:
    raw = make_raw(**SMALL_CHANGES[2])
    (tmp_path / "config.json").write_text(json.dumps(raw))
    path = tmp_path / WEIGHTS
    write_headers(path, specs_of(raw))
    whole = bytearray(path.read_bytes())
    meta = whole.index(b"__metadata__")
    draw = torch.Generator().manual_seed(5)
    places = [*range(64), *torch.randint(64, len(whole) * 8, (400,), generator=draw).tolist()]
    for place in places:
        if meta - 2 <= place // 8 < meta + 33:
            continue  # the metadata say nothing about a tensor
        whole[place // 8] ^= 1 << place % 8
        path.write_bytes(whole)
        try:
            assert survey_checkpoint(tmp_path).findings, f"bit {place} passed"
        except CheckpointError as error:
            assert str(path) in str(error)
        whole[place // 8] ^= 1 << place % 8
    path.write_bytes(whole)
    assert findings(tmp_path) == {}


def test_a_header_is_read_without_its_data(tmp_path: Path) -> None:
    specs = [StoredSpec("a", "F32", (3, 2), ()), StoredSpec("b", "BF16", (0, 4), ())]
    specs.append(StoredSpec("c", "I8", (), ()))
    path = tmp_path / "x.safetensors"
    assert write_headers(path, specs) == 25
    with path.open("ab") as file:
        file.write(bytes(7))
    header = read_file_header(path)
    assert {name: (e.dtype, e.shape, e.num_bytes) for name, e in header.entries.items()} == {
        "a": ("F32", (3, 2), 24),
        "b": ("BF16", (0, 4), 0),
        "c": ("I8", (), 1),
    }
    assert (header.wanted_bytes, header.present_bytes) == (25, 7)
