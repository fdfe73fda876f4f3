"""`decodegrid config check | show | schema`: what they print, and their exit statuses."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from decodegrid.capture.compile import RegionCompiler
from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.grid import GraphKey, Grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.configs.load import CONFIGS_DIR, load_config
from decodegrid.engine.build import make_regions
from decodegrid.engine.cli import main
from decodegrid.engine.deployment_check import capacity_of, check_settings
from decodegrid.graphs.checkpoint import read_checkpoint_config

RELEASED = Path(__file__).resolve().parent.parent / "released_config.json"
Check = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """check("key=value", ..., "--flag", ...): status, standard output, error lines."""

    def run(*words: str) -> tuple[int, str, list[str]]:
        given = [word if word.startswith("--") else f"--set={word}" for word in words]
        own = f"--set=compile.cache_dir={tmp_path}/cache"
        status = main(["config", "check", own, *given])
        out, err = capsys.readouterr()
        lines = err.splitlines()
        assert all(line.startswith("decodegrid: error: ") for line in lines)
        return status, out, [line.removeprefix("decodegrid: error: ") for line in lines]

    return run


def report_of(check: Check, *words: str) -> tuple[int, dict[str, Any]]:
    status, out, errors = check("--json", *words)
    assert errors == []
    report = json.loads(out)
    assert report["status"] == ("ok" if status == 0 else "refused")
    return status, report


def test_the_embedded_deployment(check: Check) -> None:
    status, out, errors = check()
    assert (status, errors) == (0, [])
    assert out.splitlines()[-1] == f"{CONFIGS_DIR / 'tiny.yaml'}: ok"
    for line in (
        "  24 pairs of (requests, query tokens)",
        "       4 with 4 8 12 16 20 24",
        "  variants: fused, rich",
        "  prefill sizes: 16 64 256 tokens",
        "  graphs to capture: 54",
        "  each of the 188 batches of 1..8 requests with 1..6 query tokens has a pair that covers "
        "it",
    ):
        assert line in out.splitlines()
    for pool in ("weights", "kv pool", "window rings", "compressor rings", "rich buffers"):
        assert re.search(rf"^  {pool} +[\d,]+$", out, re.MULTILINE), pool
    assert "not counted: intermediate results" in out
    assert "warning" not in out and "not checked" not in out


def test_numbers_of_the_report(check: Check) -> None:
    status, report = report_of(check)
    assert status == 0
    assert report["problems"] == report["warnings"] == report["not_checked"] == []
    assert report["deployment"] == str(CONFIGS_DIR / "tiny.yaml")
    plan, memory = report["plan"], report["memory"]
    pairs = [[b, b * n] for b in (1, 2, 4, 8) for n in range(1, 7)]
    assert plan["pairs"] == pairs and plan["variants"] == ["fused", "rich"]
    assert plan["num_graphs"] == len(report["graphs"]) == 2 * (24 + 3)
    assert report["coverage"] == {
        "batches": sum(6 * b - b + 1 for b in range(1, 9)),
        "max_num_reqs": 8,
        "max_query_tokens_per_req": 6,
        "problem": None,
    }
    assert memory["total_bytes"] == sum(memory["pools"].values())
    for pool, size in memory["pools"].items():
        assert size == sum(part["bytes"] for part in memory["parts"] if part["pool"] == pool)
    # 8 requests of 4096 tokens in blocks of 64, and the null block.
    assert memory["kv"]["blocks"] == 8 * 64 + 1
    assert memory["kv"]["tokens"] == 8 * 4096
    assert memory["pools"]["kv pool"] == (8 * 64 + 1) * 64 * memory["kv"]["bytes_per_token"]
    assert memory["kv"]["max_concurrency"] == 8.0
    sizes = [row["static_bytes"] for row in report["graphs"] if row["graph"].endswith("fused")]
    assert sizes[0] == max(sizes) > 5 * min(sizes) and min(sizes) == sizes[-1]


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["model.checkpoint=tiny-v41", "cache.kv_cache=v41"],
        ["speculation.num_draft_tokens=0", "grid.rich=false"],
        ["speculation.verify=rejection"],
        ["prefill.bounded_replay=compact", "prefill.keep_tokens=80"],
    ],
)
def test_regions_are_those_that_a_start_plans(check: Check, settings: list[str]) -> None:
    _, report = report_of(check, *settings)
    loaded = load_config(None, settings)
    counters = CaptureCounters()
    compiler = RegionCompiler(CompileOptions("eager"), counters)
    model = read_checkpoint_config(loaded.checkpoint_dir)
    capacity = capacity_of(loaded.config, 9)
    table = make_regions(model, capacity, compiler, "eager")
    regions = report["plan"]["regions"]
    assert regions["compilations"] == counters.planned_compilations > 0
    assert regions["compiled"] == len(counters.planned_by_region)
    assert regions["opaque"] == len(table.calls) - len(counters.planned_by_region)


def test_every_problem_is_listed(check: Check, tmp_path: Path) -> None:
    status, out, errors = check("scheduler.max_model_len=5000", "cache.pool_bytes=1000")
    assert (status, out) == (2, "")
    assert len(errors) == 2
    assert errors[0].startswith("cache.pool_bytes = 1000 gives the pool 1000 bytes; a block")
    assert errors[1] == (
        "scheduler.max_model_len is 5000; the checkpoint's max_position_embeddings is 4096"
    )
    path = tmp_path / "bad.yaml"
    path.write_text("cache:\n  block_size: 3\n  nope: 1\nmax_num_seqs: 4\n")
    status, out, errors = check(f"--config={path}")
    assert (status, out) == (2, "")
    assert len(errors) == 3 and {line.split(":")[1] for line in errors} == {"2", "3", "4"}
    status, report = report_of(check, f"--config={path}")
    assert status == 2 and sorted(report["problems"]) == sorted(errors)
    assert report["plan"] is report["memory"] is None and report["deployment"] == str(path)


def test_a_batch_without_a_pair(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    holed = Grid([GraphKey(1, 6), GraphKey(8, 40)], 8, 5)
    monkeypatch.setattr("decodegrid.engine.config_check.grid_of", lambda config: holed)
    status, out, (error,) = check()
    assert status == 2 and not out.endswith(": ok\n")
    assert "no captured pair covers 7 requests with 41 query tokens" in error
    assert f"\ncoverage\n  {error}\n" in out
    _, report = report_of(check)
    assert report["coverage"]["problem"] == error and report["problems"] == [error]


def test_a_grid_that_leaves_the_largest_batch_out(check: Check) -> None:
    status, _, (error,) = check("grid.num_reqs=[1, 4]")
    assert status == 2 and "must end with scheduler.max_num_reqs = 8" in error
    status, _, (error,) = check("grid.pairs=[[1, 6], [8, 40]]")
    assert status == 2 and "must end with [8, 48]" in error and "got [8, 40]" in error


def test_a_pool_that_holds_no_request_of_the_largest_length(check: Check) -> None:
    """A start takes it and refuses such requests when they come, so that it is a warning."""
    small = ("scheduler.max_model_len=2048", "cache.num_blocks=2")
    status, out, errors = check(*small)
    assert (status, errors) == (0, [])
    warning = (
        "cache.num_blocks: the pool has 1 usable blocks of 64 tokens, 64 tokens; a request of "
        "scheduler.max_model_len = 2048 needs 32, and one that may grow beyond 64 is refused when "
        "it comes"
    )
    assert f"\nwarning: {warning}\n" in out
    status, out, errors = check(*small, "--strict")
    assert status == 2 and not out.endswith(": ok\n")
    assert errors == ["--strict: 1 thing is doubtful or not checked"]
    status, report = report_of(check, *small, "--strict")
    assert status == 2 and report["warnings"] == [warning] and report["problems"] == []
    assert report["memory"]["kv"]["max_concurrency"] == round(1 / 32, 2)
    status, out, _ = check("cache.num_blocks=33", "scheduler.max_model_len=2048", "--strict")
    assert status == 0 and "warning" not in out
    status, out, _ = check("cache.num_blocks=6", "scheduler.max_model_len=64")
    assert "the pool has 5 usable blocks, fewer than scheduler.max_num_reqs = 8" in out


def test_a_pool_of_bytes_is_named_by_its_key(check: Check) -> None:
    _, report = report_of(check, "cache.pool_bytes=200KiB")
    (warning,) = report["warnings"]
    assert warning.startswith("cache.pool_bytes: the pool has ")


def test_cuda_without_a_gpu(check: Check) -> None:
    status, out, errors = check("model.device=cuda")
    assert (status, errors) == (0, [])
    line = "not checked: model.device is cuda, but torch finds no CUDA device"
    assert line in out.splitlines() and out.endswith(": ok\n")
    assert "memory on cuda, in bytes" in out and "  share of a card: H100 80 GB: " in out
    assert "known after capture" in out
    assert check("model.device=cuda", "--strict")[0] == 2


def test_a_checkpoint_that_is_elsewhere(check: Check, tmp_path: Path) -> None:
    absent = f"model.checkpoint={tmp_path}/model"
    status, out, errors = check(absent)
    assert (status, out, errors) == (2, "", [f"{tmp_path}/model: no such checkpoint directory"])
    for extra in ("model.device=cuda", "--elsewhere"):
        status, report = report_of(check, absent, extra)
        assert status == 0 and report["problems"] == []
        assert report["not_checked"][0] == (
            f"{tmp_path}/model: no checkpoint here: what depends on the model, sizes among it "
            "(--model-config FILE takes its config.json from elsewhere)"
        )
        assert report["memory"] is report["model"] is report["plan"]["regions"] is None
        assert report["plan"]["num_graphs"] == 54 and report["coverage"]["problem"] is None
        assert report_of(check, absent, extra, "--strict")[0] == 2
    status, out, _ = check(absent, "--elsewhere", "cache.num_blocks=3")
    assert status == 0 and "warning: cache.num_blocks: the pool has 2 usable blocks" in out


def test_sizes_from_a_description(check: Check, tmp_path: Path) -> None:
    """Those of the same model whose checkpoint is there."""
    absent = f"model.checkpoint={tmp_path}/model"
    given = f"--model-config={CONFIGS_DIR / 'tiny' / 'config.json'}"
    status, report = report_of(check, absent, given, "model.dtype=bfloat16")
    _, wanted = report_of(check, "model.dtype=bfloat16")
    assert status == 0
    for part in ("plan", "coverage", "memory", "graphs"):
        assert report[part] == wanted[part]
    assert report["not_checked"] == [f"{tmp_path}/model: tokenizer and tensors of the checkpoint"]
    # In float32 the values of the tensors decide how matrices are stored.
    _, report = report_of(check, absent, given)
    _, wanted = report_of(check)
    assert report["memory"]["pools"]["weights"] > wanted["memory"]["pools"]["weights"]
    assert "counted in float32" in report["memory"]["notes"][0]
    # A directory with nothing but config.json is a description too.
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes(
        (CONFIGS_DIR / "tiny" / "config.json").read_bytes()
    )
    status, report = report_of(check, absent, "--elsewhere", "model.dtype=bfloat16")
    _, wanted = report_of(check, "model.dtype=bfloat16")
    assert status == 0 and report["memory"] == wanted["memory"]


def test_descriptions_that_are_none(check: Check, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    for text, wanted in (
        (None, f"{path}: no such file"),
        ("{", f"{path}: not valid JSON"),
        ("{}", f"{path}: config.json: model_type is None"),
    ):
        if text is not None:
            path.write_text(text)
        status, out, (error,) = check(f"--model-config={path}")
        assert (status, out) == (2, "") and error.startswith(wanted)
    raw = json.loads((CONFIGS_DIR / "tiny" / "config.json").read_text())
    raw["text_config"]["n_routed_experts"] = 10**6
    path.write_text(json.dumps(raw))
    status, _, (error,) = check(f"--model-config={path}")
    assert status == 2 and "tensors, above 1,000,000" in error


def test_more_processes_than_this_version_runs(check: Check) -> None:
    own = ("model.device=cuda", f"--model-config={RELEASED}", "model.dtype=bfloat16")
    status, out, errors = check(*own, "parallel.expert=8")
    refusal = "parallel.expert is 8: needs 8 processes, each with a GPU; this version runs one"
    assert (status, errors) == (2, [refusal])
    assert "memory on cuda, each of 8 processes, in bytes" in out
    assert "    routed experts, 1/8 " in out and "exchange between processes" in out
    status, report = report_of(check, *own, "parallel.expert=8")
    _, one = report_of(check, *own)
    assert (status, report["problems"]) == (2, [refusal])
    # 289 GB of experts and 203 GB of tables, of which each process holds an eighth.
    saved = one["memory"]["total_bytes"] - report["memory"]["total_bytes"]
    assert saved == pytest.approx((288.8e9 + 7.2e9 + 202.8e9) * 7 / 8, rel=0.001)
    with pytest.raises(ValueError, match=re.escape(refusal)):
        check_settings(load_config(None, ["model.device=cuda", "parallel.expert=8"]))
    status, out, errors = check(*own, "parallel.expert=7")
    assert (status, out) == (2, "") and errors[1] == (
        "parallel.expert is 7; it must divide the checkpoint's n_routed_experts, which is 384"
    )


def test_a_device_of_a_given_size(check: Check) -> None:
    _, report = report_of(check)
    total = report["memory"]["total_bytes"]
    assert check(f"--device-memory={total}")[0] == 0
    status, out, errors = check(f"--device-memory={total - 1}")
    assert status == 2 and "memory on cpu" in out
    assert errors == [f"{total:,} bytes are needed on a device of {total - 1:,} (--device-memory)"]
    status, _, (error,) = check("--device-memory=lots")
    assert status == 2 and error.startswith("--device-memory must be a whole number of bytes")


def test_a_share_of_the_memory(check: Check) -> None:
    share = "cache.memory_fraction=0.5"
    status, report = report_of(check, share)
    assert status == 0 and report["memory"]["kv"]["blocks"] == 513
    assert report["memory"]["notes"] == [
        "cache.memory_fraction = 0.5: the pool is sized at start, by the memory that is free then; "
        "shown is the most that it can be"
    ]
    weights = report["memory"]["pools"]["weights"]
    block = report["memory"]["pools"]["kv pool"] // 513
    size = weights + 2 * 100 * block
    _, report = report_of(check, share, f"--device-memory={size}")
    # A hundred blocks, less what five significant bits drop of it.
    assert report["memory"]["kv"]["blocks"] == 100 and report["problems"] != []


def test_memory_that_this_machine_does_not_have(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decodegrid.engine.config_check.free_bytes", lambda device: 1000)
    status, report = report_of(check)
    total = report["memory"]["total_bytes"]
    assert status == 0 and report["warnings"] == [
        f"{total:,} bytes are needed, and 1,000 are free on this machine's cpu"
    ]
    for elsewhere in ("--elsewhere", "--device-memory=1GB"):
        assert report_of(check, elsewhere)[1]["warnings"] == []


def test_settings_that_do_nothing(check: Check, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "cache:\n  prefix_cache: off\n  prefix_snapshots: 32\n"
        "speculation: {verify_tokens: all}\nsurface: {repeats: 3}\n"
        "dumps: {num_steps: 0, keep: 8}\n"
    )
    _, report = report_of(check, f"--config={path}", "structured_outputs.compile_threads=1")
    assert sorted(report["warnings"]) == [
        "x.yaml:3: cache.prefix_snapshots = 32 does nothing with cache.prefix_cache = off",
        "x.yaml:5: surface.repeats = 3 does nothing with speculation.verify_tokens = all",
    ]
    _, report = report_of(
        check, "structured_outputs.compile_threads=1", "grid.rich=false", "dumps.num_steps=0"
    )
    assert report["warnings"] == [
        "--set: structured_outputs.compile_threads = 1 does nothing with grid.rich = false"
    ]


def test_prefill_sizes_beyond_every_prompt(check: Check, tmp_path: Path) -> None:
    _, report = report_of(check, "scheduler.max_model_len=65")
    assert report["warnings"] == [
        "scheduler.prefill_chunk_sizes: [256] are never used; with scheduler.max_model_len = 65 a "
        "chunk has at most 64 tokens, which 64 holds"
    ]
    assert report_of(check, "scheduler.max_model_len=66")[1]["warnings"] == []
    path = tmp_path / "x.yaml"
    path.write_text("scheduler: {max_model_len: 65}\n")  # the sizes are the default's
    assert report_of(check, f"--config={path}")[1]["warnings"] == []


def test_files_of_keys(check: Check, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    status, report = report_of(check, f"server.api_keys_file={path}")
    wanted = f"{path}: no such file; serve needs it (server.api_keys_file)"
    assert (status, report["warnings"]) == (0, [wanted])
    path.write_text("short\n")
    status, _, errors = check(f"server.api_keys_file={path}")
    assert (status, errors) == (2, [f"{path}:1: a key needs at least 16 characters"])
    path.write_text("0123456789abcdef\n")
    status, out, _ = check(f"server.api_keys_file={path}", "--strict")
    assert status == 0 and "0123456789abcdef" not in out


def test_a_package_that_is_elsewhere_and_a_back_end_without_code(
    check: Check, tmp_path: Path
) -> None:
    package = f"compile.package={tmp_path}/package"
    status, report = report_of(check, package, "--elsewhere")
    line = f"{tmp_path}/package: no package here: whether it is of this deployment"
    assert (status, line in report["not_checked"]) == (0, True)
    status, out, (error,) = check(package)
    assert status == 2 and f"{tmp_path}/package" in error
    status, out, errors = check(package, "compile.backend=eager", "--elsewhere")
    assert (status, out) == (2, "")
    assert errors[0].startswith("compile.backend is eager; only inductor makes the code")


def test_show_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same key in the file and on the command line: the command line wins, and says so."""
    path = tmp_path / "a.yaml"
    path.write_text("scheduler:\n  max_num_reqs: 3\n  max_model_len: 64\n")
    argv = ["config", "show", f"--config={path}", "--json", "--set=scheduler.max_num_reqs=4"]
    assert main(argv) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["deployment"] == str(path)
    rows = {row["key"]: (row["value"], row["origin"]) for row in shown["values"]}
    assert rows["scheduler.max_num_reqs"] == (4, "--set")
    assert rows["scheduler.max_model_len"] == (64, "a.yaml:3")
    assert rows["scheduler.prefill_chunk_sizes"] == ([16, 64, 256], "default")
    assert set(rows) == set(load_config(path).origins)


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["additionalProperties"] is False and "scheduler" in schema["properties"]


def test_nothing_is_allocated_for_the_released_model(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """763 billion weights are counted where no tensor has memory beside small tables."""
    real, made = torch.empty, []

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        tensor = real(*args, **options)
        if not tensor.is_meta:
            made.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr("torch.empty", empty)
    status, report = report_of(check, "model.device=cuda", f"--model-config={RELEASED}")
    assert status == 0 and report["memory"]["total_bytes"] > 500e9
    assert sum(made) < 50e6
