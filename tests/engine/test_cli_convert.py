"""`decodegrid convert`: the printed table, exit statuses, and sizes as arguments."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decodegrid.engine.cli import main
from decodegrid.graphs.checkpoint import check_checkpoint, save_model
from decodegrid.graphs.drafter import DraftModel


@pytest.fixture(scope="module")
def floats(
    make_model: Callable[..., DraftModel],
    make_raw: Callable[..., dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    changes = {"moe_intermediate_size": 32, "engram_head_dim": 32}
    directory = tmp_path_factory.mktemp("cli") / "floats"
    model = make_model(dtype=torch.float32, **changes)
    save_model(model, directory, torch.bfloat16, make_raw(**changes))
    return directory


def test_convert_prints_the_errors_by_kind(
    floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "q"
    assert main(["convert", str(floats), str(target), "--max-shard-size", "100KiB"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    heads = re.split(r"\s{2,}", lines[0])
    wanted = ["kind", "tensors", "bytes before", "bytes after", "max |error|", "relative RMS error"]
    assert heads == wanted
    rows = {line.split("  ")[0].strip(): line.split() for line in lines[1:-1]}
    assert rows.keys() == {"float", "wide float", "fp8 32x32", "fp8 rows", "mxfp4"}
    # 8 layers of 8 experts and 2 of 4, 3 matrices of 32 x 32: 2 bytes a weight, then 17 / 32.
    experts = (8 * 8 + 2 * 4) * 3
    assert rows["mxfp4"][1:4] == [str(experts), f"{experts * 2048:,}", f"{experts * 544:,}"]
    assert lines[-1] == f"written to {target}"
    assert err == ""
    assert check_checkpoint(target).quantized
    assert len(list(target.glob("model-*.safetensors"))) > 2
    assert main(["convert", str(target), str(tmp_path / "b"), "--to", "f32"]) == 0
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("size", ["0", "-1", "4 parsecs", "", "1e400GiB"])
def test_a_bad_size(
    floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    argv = ["convert", str(floats), str(tmp_path / "q"), f"--max-shard-size={size}"]
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"decodegrid: error: --max-shard-size is {size!r}; must be a size")
    assert not list(tmp_path.iterdir())


def test_user_errors_are_one_line_and_status_2(
    floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv, message in (
        (["convert", str(floats), str(floats)], "is both source and target"),
        (["convert", str(floats), str(tmp_path / "q"), "--to", "bf16"], "stored as bf16 already"),
        (["convert", str(tmp_path / "no"), str(tmp_path / "q")], "no such checkpoint directory"),
        (["convert", str(floats)], "required: DST"),
        (["convert", str(floats), str(tmp_path / "q"), "--to", "fp4"], "invalid choice: 'fp4'"),
    ):
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1 and message in err, err
    assert not list(tmp_path.iterdir())
