"""Directories that are no usable checkpoints, as a command meets them: one line, status 2."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decodegrid.configs.load import CONFIGS_DIR
from decodegrid.engine.cli import main
from decodegrid.engine.terminal_text import printable
from decodegrid.graphs.checkpoint import check_checkpoint, save_quantised
from decodegrid.graphs.checkpoint_names import CheckpointError
from decodegrid.graphs.drafter import DraftModel

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CHANGES = {"moe_intermediate_size": 32, "engram_head_dim": 32}
Refusals = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def saved(
    make_model: Callable[..., DraftModel],
    make_raw: Callable[..., dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    model = make_model(dtype=torch.float32, **CHANGES)
    save_quantised(model, directory, make_raw(**CHANGES))
    return directory


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """Links to a good checkpoint, to be replaced."""
    directory = tmp_path / "model"
    directory.mkdir()
    for path in saved.iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "tokenizer.json").symlink_to(CONFIGS_DIR / "tiny" / "tokenizer.json")
    return directory


@pytest.fixture
def refusals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refusals:
    """refusals(directory): the error lines of `inspect` and of `config check`."""
    # This vocabulary is smaller than the tokenizer's, which is not what is asked about here.
    tokenizer = "decodegrid.engine.tokenizer.Tokenizer.check_vocabulary"
    monkeypatch.setattr(tokenizer, lambda *arguments: None)

    def call(*argv: str) -> str:
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("decodegrid: error: ") and err.endswith("\n")
        line = err.removeprefix("decodegrid: error: ").removesuffix("\n")
        assert line.isprintable(), line
        return line

    def both(directory: Path) -> tuple[str, str]:
        limits = ["--set=scheduler.max_model_len=200", "--set=speculation.num_draft_tokens=0"]
        check = ("config", "check", *limits, f"--set=model.checkpoint={directory}")
        return call("inspect", str(directory)), call(*check)

    return both


def replace(path: Path, text: str | bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"].update(changes)
    replace(path, json.dumps(raw))


def change_header(directory: Path, change: Callable[[str], str]) -> None:
    """Rewrite the text of the header; the data stay as they are."""
    path = directory / WEIGHTS
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = change(data[8:start].decode()).encode()
    replace(path, len(header).to_bytes(8, "little") + header + data[start:])


def without_last_brace(text: str) -> str:
    return text.rstrip().removesuffix("}")


EMPTY = '{"dtype":"F32","shape":[0],"data_offsets":[END,END]}'


def add_entry(directory: Path, name: str, entry: str = EMPTY) -> None:
    """One more header entry; END in it stands for the length of the data."""

    def change(text: str) -> str:
        header = json.loads(text)
        header.pop("__metadata__", None)
        end = max(value["data_offsets"][1] for value in header.values())
        return f"{without_last_brace(text)},{json.dumps(name)}:{entry.replace('END', str(end))}}}"

    change_header(directory, change)


def test_files_that_cannot_be_read_through(checkpoint: Path, refusals: Refusals) -> None:
    config = checkpoint / "config.json"
    good = config.read_text()
    config.unlink()
    os.mkfifo(config)  # a reader would wait for ever
    assert set(refusals(checkpoint)) == {f"{config}: is not a regular file"}
    replace(config, "")
    os.truncate(config, 10 * 2**30)  # sparse
    assert set(refusals(checkpoint)) == {f"{config}: is longer than 100000000 bytes"}
    replace(config, good)
    (checkpoint / WEIGHTS).rename(checkpoint / "m.safetensors")
    os.mkfifo(checkpoint / INDEX)
    wanted = f"{checkpoint}: not a checkpoint: has neither {WEIGHTS} nor {INDEX}"
    assert refusals(checkpoint) == (wanted, f"{checkpoint / WEIGHTS}: no such file")


@pytest.mark.parametrize("name", ["..", "", ".", "../x", "/x", "a\0b", "\ud800", "a\x1bb", 5])
def test_an_index_with_what_is_no_file_name(
    checkpoint: Path, refusals: Refusals, name: str | int
) -> None:
    (checkpoint / WEIGHTS).unlink()
    replace(checkpoint / INDEX, json.dumps({"weight_map": {"head.weight": name}}))
    place = f"{checkpoint / INDEX}: weight_map places head.weight in "
    assert set(refusals(checkpoint)) == {f"{place}{name!r}, not a file name"}


def test_names_that_a_terminal_would_obey_or_cannot_show(
    checkpoint: Path, refusals: Refusals, capsys: pytest.CaptureFixture[str]
) -> None:
    add_entry(checkpoint, "\x1b[31mx\ny")
    argv = ["inspect", str(checkpoint)]
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert "! tensors are unexpected: 1 (\\x1b[31mx\\ny)\n" in out and "\x1b" not in out
    add_entry(checkpoint, "\ud800")
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert "2 (\\x1b[31mx\\ny; \\ud800)" in out and out.encode()
    assert main([*argv, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["count"] == 2
    change_config(checkpoint, **{"\x1b[31m": 1})
    assert "text_config.\\x1b[31m is 1; the field is unknown" in refusals(checkpoint)[0]
    assert printable("d\u00e9j\u00e0 \u6f22 x") == "d\u00e9j\u00e0 \u6f22 x"


def test_an_entry_twice(checkpoint: Path, refusals: Refusals) -> None:
    """A reader that takes the last of two would load whatever that says."""
    shape = '"shape":[96,32]'
    text = (checkpoint / WEIGHTS).read_bytes().decode("latin-1")
    start = text.index('"head.weight":')
    entry = text[start : text.index("}", start) + 1]
    assert shape in entry
    change_header(checkpoint, lambda header: f"{without_last_brace(header)},{entry}}}")
    wanted = f"{checkpoint / WEIGHTS}: the header is not valid JSON: the key 'head.weight' is there"
    assert set(refusals(checkpoint)) == {f"{wanted} twice"}


def test_metadata_and_shapes_that_no_writer_makes(checkpoint: Path, refusals: Refusals) -> None:
    path = checkpoint / WEIGHTS
    good = path.read_bytes()
    add_entry(checkpoint, "__metadata__", "5")
    first, second = refusals(checkpoint)
    assert first == f"{path}: __metadata__ must be an object of texts"
    assert second.startswith(f"{path}: not a readable safetensors file: ")
    replace(path, good)
    axes = ",".join(["4611686018427387904"] * 100_000)  # minutes to multiply
    add_entry(checkpoint, "x", f'{{"dtype":"F32","shape":[{axes}],"data_offsets":[END,END]}}')
    first, second = refusals(checkpoint)
    assert first.startswith(f"{path}: tensor x: shape is [4611686018427387904, 46")
    assert first.endswith("; must be a list of at most 8 counts") and len(first) < 400
    assert second.startswith(f"{path}: not a readable safetensors file: ")


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"hidden_size": 2**31 - 32}, "embed.weight"),
        ({"hc_mult": 2**30}, "layers.0.hc_attn_base"),
        ({"vocab_size": 2**31 - 1}, "embed.weight"),
        ({"head_dim": 2**31 - 2, "num_attention_heads": 2**30}, "layers.0.attn.attn_sink"),
    ],
)
def test_sizes_beyond_any_memory(
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    refusals: Refusals,
    changes: dict[str, int],
    tensor: str,
) -> None:
    """Compared with the files before anything of that size is made, in memory or without."""
    change_config(checkpoint, **changes)
    assert main(["inspect", str(checkpoint)]) == 1
    assert "! tensors have a wrong shape" in capsys.readouterr().out
    argv = ["--set=scheduler.max_model_len=200", f"--set=model.checkpoint={checkpoint}"]
    assert main(["config", "check", "--set=speculation.num_draft_tokens=0", *argv]) == 2
    err = capsys.readouterr().err
    assert f"{WEIGHTS}: tensor {tensor} has shape" in err and "; config.json asks for [" in err


@pytest.mark.parametrize("name", ["engram_n_heads", "engram_max_ngram_size"])
def test_columns_without_end(checkpoint: Path, refusals: Refusals, name: str) -> None:
    """Nobody waits for a thousand million primes."""
    change_config(checkpoint, **{name: 2**30})
    for line in refusals(checkpoint):
        assert "config.json: text_config.engram_num_embeddings is [184, 258]; the " in line
        assert f"{name} {2**30}" in line


def test_more_tensors_than_are_enumerated(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(checkpoint, n_routed_experts=25_000)
    assert main(["inspect", str(checkpoint)]) == 2
    assert "asks for up to 1,200,752 tensors, above 1,000,000" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["~nobody-of-this-name/x", "circle"])
def test_paths_that_lead_nowhere(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "circle").symlink_to("circle")
    path = tmp_path / "deployment.yaml"
    path.write_text(f"model: {{checkpoint: {place}}}")
    assert main(["config", "check", "--config", str(path)]) == 2
    wanted = f"{tmp_path / place}: no such checkpoint directory"
    assert capsys.readouterr().err == f"decodegrid: error: {wanted}\n"


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("unable to mmap")])
def test_a_file_that_the_address_space_has_no_room_for(
    saved: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("decodegrid.graphs.checkpoint_files.safe_open", refuse)
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(saved)
    assert str(caught.value) == f"{saved / WEIGHTS}: not a readable safetensors file: {error}"


@pytest.mark.parametrize("value", ["-1", "1.5", "12 parsecs", "true", "1e400GB"])
def test_a_pool_of_what_is_no_size(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", f"--set=cache.pool_bytes={value}"]) == 2
    wanted = "must be a whole number of bytes, or a size such as 512MiB, got "
    if value == "-1":
        wanted = "must be greater than or equal to 0, got -1"
    assert f": cache.pool_bytes: {wanted}" in capsys.readouterr().err


def test_a_disk_that_fills_while_converting(saved: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    command = [sys.executable, "-m", "decodegrid", "convert", str(saved), str(tmp_path / "f")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=CONFIGS_DIR.parent, preexec_fn=limit
    )
    assert done.returncode == 2 and done.stdout == ""
    line = done.stderr.removesuffix("\n")
    assert "\n" not in line and f"{tmp_path}/.f.part-" in line
    assert "cannot be written: " in line and "File too large" in line
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_copied_is_found_before_a_weight_is_read(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: object) -> None:
        raise AssertionError("tensors were written")

    monkeypatch.setattr("decodegrid.graphs.checkpoint_convert.write_tensors", never)
    (checkpoint / "tokenizer.json").unlink()  # of another vocabulary
    extra = checkpoint / "extra.json"
    for make in (extra.mkdir, lambda: os.mkfifo(extra), lambda: extra.symlink_to("/nowhere/x")):
        make()
        assert main(["convert", str(checkpoint), str(tmp_path / "f")]) == 2
        assert capsys.readouterr().err.startswith(f"decodegrid: error: {extra}: ")
        extra.rmdir() if extra.is_dir() else extra.unlink()
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
