"""`decodegrid config check` refuses what start-up refuses before it compiles, in the same words."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decodegrid.configs.load import CONFIGS_DIR, load_config
from decodegrid.engine import build
from decodegrid.engine.cli import main
from decodegrid.engine.llm import LLM
from decodegrid.engine.terminal_text import one_line
from decodegrid.graphs import checkpoint as checkpoint_module
from decodegrid.kernels import native

TINY = CONFIGS_DIR / "tiny"
Refusal = Callable[..., str]

UNCALIBRATED = [
    f"speculation.confidence_temperatures.{mode}=[]" for mode in ("coupled", "rejection")
]
"""The embedded deployment holds a calibration for five drafts."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The embedded checkpoint as a directory of links, to be broken file by file."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (directory / name).symlink_to(TINY / name)
    return directory


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"].update(changes)
    path.unlink()
    path.write_text(json.dumps(raw))


@pytest.fixture
def refusal(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Refusal:
    """refusal(*overrides): the first error line of the check, which start-up repeats. The check
    goes on and may find more."""

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("start-up went on to allocate and compile")

    def check(*overrides: str) -> str:
        own = [f"model.checkpoint={checkpoint}", f"compile.cache_dir={checkpoint.parent}/cache"]
        settings = [*own, *overrides]
        argv = ["config", "check", *(f"--set={text}" for text in settings)]
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert ": ok" not in out
        with pytest.raises((ValueError, OSError)) as caught:
            LLM(load_config(None, settings))
        first = err.splitlines()[0]
        assert first == f"decodegrid: error: {one_line(caught.value)}"
        return first.removeprefix("decodegrid: error: ")

    monkeypatch.setattr(build, "make_runner", never)
    return check


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["speculation.num_draft_tokens=6", *UNCALIBRATED],
            "speculation.num_draft_tokens is 6; the drafter's dspark_block_size allows at most 5",
        ),
        (
            ["scheduler.max_model_len=4097"],
            "scheduler.max_model_len is 4097; the checkpoint's max_position_embeddings is 4096",
        ),
        (["model.checkpoint=/nowhere/model"], "/nowhere/model: no such checkpoint directory"),
        (
            ["scheduler.max_model_len=6"],
            "scheduler.max_model_len is 6; measuring step times with "
            "speculation.num_draft_tokens = 5 needs at least 7 (surface.repeats 0 measures none)",
        ),
    ],
)
def test_settings_that_do_not_fit(refusal: Refusal, overrides: list[str], message: str) -> None:
    assert refusal(*overrides) == message


def test_a_device_that_is_not_there(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Start-up refuses; the check, which may run far from the GPUs, says it and goes on."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    settings = [f"model.checkpoint={checkpoint}", "model.device=cuda"]
    message = "model.device is cuda, but torch finds no CUDA device"
    with pytest.raises(ValueError) as caught:
        LLM(load_config(None, settings))
    assert str(caught.value) == message
    argv = ["config", "check", *(f"--set={text}" for text in settings)]
    assert main(argv) == 0
    assert f"\nnot checked: {message}\n" in capsys.readouterr().out
    assert main([*argv, "--strict"]) == 2


def test_drafts_without_a_drafter(refusal: Refusal, checkpoint: Path) -> None:
    change_config(checkpoint, num_nextn_predict_layers=0, compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1])
    wanted = "but the checkpoint has no drafter (num_nextn_predict_layers is 0)"
    assert refusal() == f"speculation.num_draft_tokens is 5, {wanted}"


def test_config_json(refusal: Refusal, checkpoint: Path) -> None:
    change_config(checkpoint, engram_max_ngram_size=1)
    assert "text_config.engram_max_ngram_size is 1; must be 2 or more" in refusal()
    (checkpoint / "config.json").write_text("{")
    assert "config.json: not valid JSON" in refusal()
    (checkpoint / "config.json").unlink()
    assert refusal() == f"{checkpoint / 'config.json'}: no such file"


def test_tokenizer(refusal: Refusal, checkpoint: Path) -> None:
    path = checkpoint / "tokenizer.json"
    text = path.read_text()
    path.unlink()
    assert refusal() == f"{path}: No such file or directory"
    path.write_bytes(b"\xff{}")
    assert refusal() == f"{path}: not UTF-8 at byte 0"
    path.write_text("{}")
    assert refusal().startswith(f"{path}: not a readable tokenizer")
    layout = json.loads(text)
    extra = {**layout["added_tokens"][-1], "id": 2048, "content": "<|one too many|>"}
    path.write_text(json.dumps({**layout, "added_tokens": [*layout["added_tokens"], extra]}))
    assert refusal() == f"{path}: 2049 tokens, but the model's vocabulary has 2048"


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """The parsed header of a safetensors file, and where its data start."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def write_with_header(path: Path, header: dict[str, Any], num_data_bytes: int) -> None:
    """A file of zeros under a header."""
    text = json.dumps(header).encode()
    path.unlink()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + num_data_bytes)


def test_tensor_files(refusal: Refusal, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    header, start = header_of(TINY / path.name)
    num_data_bytes = path.stat().st_size - start
    path.unlink()
    assert refusal() == f"{path}: no such file"
    shutil.copyfile(TINY / path.name, path)
    os.truncate(path, start + num_data_bytes - 1)
    assert refusal().startswith(f"{path}: not a readable safetensors file: ")
    os.truncate(path, start - 1)
    assert refusal().startswith(f"{path}: not a readable safetensors file: ")

    name = "layers.0.attn.wkv.weight"
    shape = header[name]["shape"]
    header[name]["shape"] = shape[::-1]
    write_with_header(path, header, num_data_bytes)
    wanted = f"tensor {name} has shape {shape[::-1]}; config.json asks for {shape}"
    assert refusal() == f"{path}: {wanted}"
    entry = header.pop(name) | {"shape": shape}
    write_with_header(path, {**header, "layers.0.attn.wkx.weight": entry}, num_data_bytes)
    assert refusal() == f"{path}: unexpected tensor layers.0.attn.wkx.weight"
    write_with_header(path, {**header, "vision.weight": entry}, num_data_bytes)
    assert refusal() == f"{checkpoint}: tensor {name} missing"


def test_a_form_in_memory_that_the_checkpoint_does_not_have(
    refusal: Refusal, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored_as = "but the checkpoint is stored as floats; must be 'expanded'"
    for form in ("packed", "packed_experts"):
        assert refusal(f"model.weights={form}") == f"{checkpoint}: weights is '{form}', {stored_as}"
    tables = "model.engram_tables=mapped"
    assert refusal(tables) == (
        f"{checkpoint / 'model.safetensors'}: tensor layers.1.engram.embed.weight is stored as "
        "BF16; a table of floats can stay mapped only in the model's dtype, which is torch.float32"
    )
    own = [f"--set=model.checkpoint={checkpoint}", f"--set={tables}"]
    assert main(["config", "check", *own, "--set=model.dtype=bfloat16"]) == 0
    capsys.readouterr()
    # What two settings exclude is said by the loader, with their place.
    assert main(["config", "check", *own, "--set=model.device=cuda"]) == 2
    wanted = 'model.engram_tables: must be "memory" with model.device = cuda'
    assert wanted in capsys.readouterr().err


def test_a_cache_directory_that_cannot_be_written(refusal: Refusal, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    assert refusal(f"compile.cache_dir={in_the_way}/deep/er") == (
        f"{in_the_way}/deep/er: the native kernels cannot be built there ({in_the_way} is no "
        "directory); set compile.cache_dir to a directory that can be written"
    )


def test_a_read_only_cache_with_the_kernels_in_it_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    argv = ["config", "check", f"--set=compile.cache_dir={tmp_path}"]
    assert main(argv) == 2
    assert f"{tmp_path} cannot be written" in capsys.readouterr().err
    native.library_path(tmp_path).write_bytes(b"")
    assert main(argv) == 0


def test_a_good_deployment_reads_and_writes_nothing_more(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(checkpoint_module, "allocate", never)
    monkeypatch.setattr(checkpoint_module, "fill", never)
    cache = checkpoint.parent / "cache"
    settings = [f"--set=model.checkpoint={checkpoint}", f"--set=compile.cache_dir={cache}"]
    assert main(["config", "check", *settings]) == 0
    out, err = capsys.readouterr()
    assert out.endswith(f"\n{CONFIGS_DIR / 'tiny.yaml'}: ok\n") and err == ""
    assert not cache.exists()
    assert main(["config", "check", *settings, "--set=speculation.num_draft_tokens=0"]) == 0
    assert main(["config", "check", *settings, "--set=scheduler.max_model_len=7"]) == 0
    capsys.readouterr()
    assert main(["config", "check", *settings, "--set=cache.memory_fraction=0.25"]) == 0
    note = "the pool is sized at start, by the memory that is free then"
    assert f"cache.memory_fraction = 0.25: {note}; " in capsys.readouterr().out


def test_neither_command_imports_a_compiler_and_show_needs_no_checkpoint() -> None:
    code = (
        "import sys; from decodegrid.engine.cli import main; "
        "status = main(['config', 'show', '--set', 'model.checkpoint=/nowhere']); "
        "assert status == 0 and 'torch' not in sys.modules; "
        "status = main(['config', 'check']); "
        "assert status == 0 and 'torch._inductor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CONFIGS_DIR.parent)
