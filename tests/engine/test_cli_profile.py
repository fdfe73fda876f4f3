"""`decodegrid profile` on a small real runner: what it measures, counts, writes and refuses."""

import csv
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from decodegrid.capture import peaks, report_libraries, report_page, report_png
from decodegrid.capture.grid import GraphKey, build_grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.phases import PhaseClock
from decodegrid.capture.plan_costs import read_costs
from decodegrid.capture.profile_document import Profile, profile_text, read_profile
from decodegrid.capture.surface_store import SurfaceStore
from decodegrid.configs.load import LoadedConfig, load_config
from decodegrid.engine import build
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.engine.cli import main
from decodegrid.engine.ledger import Measured, ledger_text, make_profile
from decodegrid.engine.profile_live import live_facts
from decodegrid.engine.profile_run import measure_prefill, measure_runner
from decodegrid.engine.profile_trace import NamedReplay, named_runner
from decodegrid.engine.runner import Runner
from decodegrid.engine.stats import EngineStats
from decodegrid.engine.surface_run import measure, surface_facts
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.graphs.checkpoint import save_model
from decodegrid.graphs.state import Capacity

LENGTH, DRAFTS = 160, 2
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", autouse=True)
def small_peaks() -> Iterator[None]:
    """The roofline is measured on little memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peaks, "BUFFER_BYTES", 2**20)
        patch.setattr(peaks, "MATRIX_SIZE", 64)
        yield


@pytest.fixture(scope="module")
def changes(tokenizer: Tokenizer) -> dict[str, Any]:
    """A model of two layers with the byte tokenizer's vocabulary."""
    return {
        "vocab_size": tokenizer.vocab_size, "hc_sinkhorn_iters": 1, "num_hidden_layers": 2,
        "compress_ratios": [2, 1, 0], "kv_source_layer_ids": [0, 1],
        "index_source_layer_ids": [0, 1], "candidate_source_layer_id": 1, "engram_layer_ids": [1],
        "engram_num_embeddings": [184], "num_nextn_predict_layers": 1,
        "dspark_target_layer_ids": [1],
    }  # fmt: skip


@pytest.fixture(scope="module")
def loaded(
    make_model: Callable[..., Any],
    make_raw: Callable[..., dict[str, Any]],
    changes: dict[str, Any],
    tokenizer: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
) -> LoadedConfig:
    directory = tmp_path_factory.mktemp("profile")
    model = make_model(dtype=torch.float32, **changes)
    save_model(model, directory / "model", torch.float32, make_raw(**changes))
    shutil.copy(tokenizer.path, directory / "model" / "tokenizer.json")
    (directory / "x.yaml").write_text(
        "model: {checkpoint: model, dtype: float64}\n"
        f"scheduler: {{max_num_reqs: 3, max_model_len: {LENGTH}, prefill_chunk_sizes: [8, 64]}}\n"
        "cache: {block_size: 8, prefix_cache: off}\n"
        f"speculation: {{num_draft_tokens: {DRAFTS}, confidence_temperatures: {{}}}}\n"
        "compile: {backend: eager, cache_dir: cache, progress: false}\n"
        "surface: {repeats: 2, context_len: 12}\n"
        "sampling: {max_tokens: 12}\n"
    )
    return load_config(directory / "x.yaml", [])


@pytest.fixture(scope="module")
def runner(make_model: Callable[..., Any], changes: dict[str, Any]) -> Runner:
    """The deployment's runner, its regions run as they are."""
    options = RunnerOptions(
        capacity=Capacity(4, 3 * LENGTH // 8 + 1, 8, LENGTH, DRAFTS, rich=True),
        grid=build_grid(3, DRAFTS),
        prefill_chunk_sizes=(8, 64),
        dtype=torch.float64,
        device="cpu",
        compile_options=CompileOptions("none", None, 1),
        draft_temperatures=(1.0, 1.0),
        show_progress=False,
    )
    return make_runner(make_model(**changes), options, PhaseClock())


@pytest.fixture
def call(
    runner: Runner,
    loaded: LoadedConfig,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Call:
    """Run the command on the runner; gives status, standard output and standard error."""
    monkeypatch.setattr(build, "build_runner", lambda loaded: runner)

    def run(*arguments: object, config: bool = True) -> tuple[int, str, str]:
        start = ["profile", *(["--config", str(loaded.path)] if config else [])]
        status = main([*start, *map(str, arguments)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture(scope="module")
def profile(runner: Runner, loaded: LoadedConfig) -> Profile:
    return make_profile(runner, loaded, measure_runner(runner, [12, 40], 1), ["decodegrid"])


def test_every_capture_has_its_line(runner: Runner, profile: Profile) -> None:
    pairs = [str(key) for key in runner.grid.capture_order()]
    assert [graph.graph for graph in profile.graphs] == [
        "prefill 64", "prefill 8",
        *(f"{pair} fused" for pair in pairs),
        "prompt logprobs 64", "prompt logprobs 8",
        *(f"{pair} rich" for pair in pairs),
    ]  # fmt: skip
    assert profile.num_captured == runner.num_captured == len(profile.graphs)
    for graph in profile.graphs:
        assert graph.capture_s > 0 and graph.num_nodes == sum(graph.nodes_by_kind.values()) > 0
        assert graph.replay_ms and graph.bytes_moved and graph.flops and graph.roofline_ms
    (largest,) = (graph for graph in profile.graphs if graph.graph == "(3, 9) fused")
    fused = runner.decode_graphs[GraphKey(3, 9)]
    assert largest.num_nodes == fused.num_nodes and largest.nodes_by_kind["opaque"] == 2
    assert largest.kernels == {"decodegrid::select_entries": 2}
    assert profile.peaks is not None
    seconds = (
        largest.bytes_moved / profile.peaks.read_bytes_per_s,  # type: ignore[operator]
        largest.flops / profile.peaks.flops_per_s,  # type: ignore[operator]
    )
    assert largest.roofline_ms == pytest.approx(1e3 * max(seconds))


def test_every_region_and_phase_has_its_line(runner: Runner, profile: Profile) -> None:
    names = {node.name for _, graph in runner.decode_graphs.items() for node in graph.nodes}  # type: ignore[attr-defined]
    regions = {region.region for region in profile.regions}
    assert names - regions == {"decodegrid.select_entries.default"}
    assert {"prefill_metadata", "adjust", "report_prompt"} <= regions
    captured = sum(graph.capture_s for graph in profile.graphs)
    (phase,) = (line for line in profile.start_up if line.name == "capture")
    assert phase.count == profile.num_captured
    # The phase holds what is around each capture, too.
    assert 0 < captured <= phase.seconds


def test_contexts_and_chunks(profile: Profile) -> None:
    assert [surface.context_len for surface in profile.surfaces] == [12, 40]
    assert all(len(surface.pairs) == len(build_grid(3, DRAFTS)) for surface in profile.surfaces)
    assert [(item.num_tokens, item.context_len) for item in profile.prefill] == [
        (8, 12), (8, 40), (8, 0), (64, 12), (64, 40), (64, 0)
    ]  # fmt: skip
    fused = {g.graph: g.replay_ms for g in profile.graphs if g.variant == "fused"}
    assert fused == {
        f"({p.num_reqs}, {p.num_query_tokens}) fused": p.median_ms
        for p in profile.surfaces[0].pairs
    }
    (chunk,) = (graph for graph in profile.graphs if graph.graph == "prefill 64")
    assert chunk.replay_ms == profile.prefill[3].median_ms


def test_long_contexts_are_cut_to_what_leaves_room(runner: Runner) -> None:
    times, reports = measure_prefill(runner, [LENGTH - DRAFTS - 1], 1)
    assert [(item.num_tokens, item.context_len) for item in times] == [
        (8, LENGTH - 9), (8, 0), (64, LENGTH - 65), (64, 0)
    ]  # fmt: skip
    assert [item.num_tokens for item in reports] == [8, 64]


def test_measuring_leaves_the_slots_as_they_were(runner: Runner) -> None:
    def slots() -> dict[str, torch.Tensor]:
        return {
            name: tensor.clone()
            for name, tensor in runner.model.state.tensors()
            if name.startswith(("slots", "rich"))
        }

    runner.model.state.slots.block_table[1, :3] = torch.tensor([4, 2, 9])
    before = slots()
    measure_runner(runner, [12], 1)
    after = slots()
    runner.model.state.slots.block_table[1] = 0
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_ledger_without_times(runner: Runner, loaded: LoadedConfig, tmp_path: Path) -> None:
    """What a package stores when only the steps were measured."""
    surface = measure(runner, 12, 1)
    (tmp_path / "ledger.json").write_text(ledger_text(runner, loaded, Measured((surface,)), ["x"]))
    found = read_profile(tmp_path / "ledger.json")
    assert found.command == ["x"] and found.live is None and found.peaks is None
    by_variant = {graph.variant: graph for graph in found.graphs}
    assert by_variant["fused"].replay_ms and by_variant["fused"].roofline_ms is None
    assert by_variant["rich"].replay_ms is None and by_variant["rich"].flops
    assert by_variant["prefill"].replay_ms is None and by_variant["prefill"].flops is None
    bare = Runner(runner.model, runner.buffers, runner.grid, runner._graphs, runner.counters)
    with pytest.raises(ValueError, match="made by hand"):
        make_profile(bare, loaded, Measured((surface,)))


def test_the_command_writes_everything(
    call: Call, runner: Runner, loaded: LoadedConfig, tmp_path: Path
) -> None:
    status, out, err = call(
        "--context-len", 40, 12, "--context-len", 30, 40, "--repeats", 1, "--ledger",
        "--json", tmp_path / "profile.json", "--csv", tmp_path / "tables",
        "--costs", tmp_path / "costs.json", "--repeat-check",
    )  # fmt: skip
    assert (status, err) == (0, "")
    found = read_profile(tmp_path / "profile.json")
    # The deployment's own context comes first.
    assert [surface.context_len for surface in found.surfaces] == [12, 40, 30]
    assert out.count("kept as ") == 3 and "ledger of the graphs" in out
    for what in ("again later", "twice in turns"):
        assert f"measured {what} at context 12: the step times of 9 pairs differ by " in out
    kept, _ = SurfaceStore(loaded.cache_dir).load(
        runner.grid.keys,
        context_len=12,
        facts=surface_facts(runner),
        max_age_s=600,
        now=found.measured_at,
    )
    assert kept is not None and dict(kept.points) == dict(found.surfaces[0].surface().points)
    with (tmp_path / "tables" / "graphs.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["graph"] for row in rows] == [graph.graph for graph in found.graphs]
    costs = read_costs(tmp_path / "costs.json")
    assert set(costs) == set(runner.grid.keys)
    variants = [g for g in found.graphs if (g.num_reqs, g.num_query_tokens) == (3, 9)]
    assert costs[GraphKey(3, 9)].capture_s == sum(graph.capture_s for graph in variants)
    # An older profile prints the same tables, and starts nothing.
    status, again, _ = call(
        "--from", tmp_path / "profile.json", "--json", tmp_path / "copy.json", "--ledger",
        config=False,
    )  # fmt: skip
    assert status == 0 and out.startswith(again.rpartition("\nprofile: ")[0])
    assert (tmp_path / "copy.json").read_text() == (tmp_path / "profile.json").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {
        "profile.json", "tables", "costs.json", "copy.json"
    }  # fmt: skip


def test_a_live_run_counts_what_was_decoded(
    call: Call, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a count of our own, taken from every step that the engine commits."""
    seen: list[tuple[GraphKey, int, int, int]] = []
    record = EngineStats.record_decode

    def watch(self: EngineStats, step: Any, result: Any, updates: Any, seconds: float) -> None:
        emitted = sum(len(update.token_ids) for update in updates)
        seen.append((result.key, len(step.slots), result.num_query_tokens, emitted))
        record(self, step, result, updates, seconds)

    monkeypatch.setattr(EngineStats, "record_decode", watch)
    assert call("--live", 5, "--repeats", 1, "--json", tmp_path / "p.json")[0] == 0
    live = read_profile(tmp_path / "p.json").live
    assert live is not None and live.num_requests == 5
    assert live.num_decode_steps == len(seen) > 0
    # No end of text is likely from a random model, but a token that ends one request is.
    assert live.num_emitted == sum(emitted for *_, emitted in seen) <= 5 * 12
    for hits in live.hits:
        steps = [s for s in seen if s[0] == GraphKey(hits.num_reqs, hits.num_query_tokens)]
        assert hits.replays == len(steps)
        assert hits.pad_rows == sum(key.num_reqs - rows for key, rows, _, _ in steps)
        assert hits.surplus_tokens == sum(key.num_query_tokens - q for key, _, q, _ in steps)
    assert sum(hits.replays for hits in live.hits) == len(seen)
    counts = live.positions
    assert len(counts.verified) == DRAFTS
    for of in zip(counts.drafted, counts.offered, counts.verified, counts.accepted, strict=True):
        assert list(of) == sorted(of, reverse=True)
    assert counts.verified[0] > 0
    assert live_facts(EngineStats(runner), 0).hits == []


def test_a_trace_names_steps_and_regions(call: Call, runner: Runner, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    status, out, _ = call("--repeats", 1, "--trace-steps", 3, "--trace", path)
    assert status == 0 and f"trace of 3 steps: {path}" in out
    events = json.loads(path.read_text())["traceEvents"]
    names = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
    assert {name for name in names if str(name).startswith("step ")} == {
        "step 1", "step 2", "step 3"
    }  # fmt: skip
    graphs = [name for name in names if str(name).endswith(" fused")]
    assert len(graphs) == 3
    # Two layers, one of the drafter: what a graph calls is a range each time.
    assert names.count("moe") == 2 * 3 and names.count("draft_moe") == 3
    assert names.count("decodegrid.select_entries.default") == 2 * 3
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    # The engine's own graphs are as before, and so is what they do.
    assert not any(isinstance(graph, NamedReplay) for graph in runner.decode_graphs.values())


def test_named_replays_do_the_same(runner: Runner) -> None:
    """Every variant, node by node; a graph that is no program is one range."""
    names: list[str] = []

    @contextmanager
    def note(name: str) -> Iterator[None]:
        names.append(name)
        yield

    named = named_runner(runner, note)
    key = GraphKey(1, 1)
    for table, graph in (
        (named.decode_graphs, runner.decode_graphs[key]),
        ({key: named.rich_graphs[key].second}, runner.rich_graphs[key].second),
    ):
        names.clear()
        table[key].replay()
        program: Any = graph
        assert names == [str(program.key), *(node.name for node in program.nodes)]
        assert table[key].num_nodes == program.num_nodes and table[key].key == program.key

    class Opaque:
        key, num_nodes, replays = "a graph", 0, 0

        def replay(self) -> None:
            self.replays += 1

    names.clear()
    opaque = Opaque()
    NamedReplay(opaque, note).replay()
    assert names == ["a graph"] and opaque.replays == 1


def test_what_cannot_be_kept_is_said(call: Call, loaded: LoadedConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, out, _ = call("--repeats", 1, "--set", f"compile.cache_dir={tmp_path / 'file'}")
    assert status == 0 and "not kept: cannot write the step-time surface" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context-len", "12", "158"], "--context-len is 158; allowed are 1..157"),
        (["--context-len", *map(str, range(1, 66))], "--context-len has 65 values; at most 64"),
        (["--repeats", "0"], "--repeats is 0; allowed are 1..1000"),
        (["--live", "0"], "--live is 0; allowed are 1..10000"),
        (["--live", "-3"], "--live is -3; allowed are 1..10000"),
        (["--trace-steps", "0", "--trace", "{}/t"], "--trace-steps is 0; allowed are 1..1000"),
        (["--trace-steps", "3"], "--trace-steps is 3; --trace FILE says where"),
        (["--trace", "{}/t"], "--trace-steps N says how many"),
        (["--trace-steps", "3", "--trace", "{}"], "--trace is {}, which is a directory"),
        (["--csv", "{}/file"], "--csv is {}/file, which is a file; a directory is needed"),
        (["--csv", "{}/no/tables"], "--csv is {}/no/tables; there is no directory {}/no"),
        (["--costs", "{}/no/c"], "--costs is {}/no/c; there is no directory {}/no"),
        (["--json", "/proc/p"], "--json is /proc/p; /proc cannot be written to: "),
        (["--csv", "/proc"], "--csv is /proc; /proc cannot be written to: "),
        (["--json", "{}/a", "--costs", "{}/a"], "--json and --costs are both {}/a"),
        (["--json", "{}/a", "--csv", "{}/a"], "--json and --csv are both {}/a"),
        (["--live", "2", "--set=scheduler.max_model_len=40"], "a built-in prompt of a live run"),
        (["--live", "2", "--set=scheduler.engine_type=prompt"], "a live run needs normal"),
        (["--live", "2", "--set=cache.num_blocks=3"], "blocks"),
        (["--set=model.device=cuda"], "model.device is cuda, but torch finds no CUDA device"),
    ],
)
def test_bad_input_is_refused_before_the_start(
    arguments: list[str],
    message: str,
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(loaded: Any) -> Any:
        raise AssertionError("the runner was built")

    monkeypatch.setattr(build, "build_runner", never)
    (tmp_path / "file").write_text("")
    status, out, err = call(*(text.replace("{}", str(tmp_path)) for text in arguments))
    assert (status, out) == (2, "")
    assert message.replace("{}", str(tmp_path)) in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_reports_are_drawn_from_the_profile(
    call: Call, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drawing itself is stood in for; a missing library is told before anything starts."""
    drawn: list[tuple[Profile, Path]] = []

    def draw(profile: Profile, path: Path) -> list[Path]:
        drawn.append((profile, path))
        return [path, path]

    monkeypatch.setattr(report_page, "write_report", draw)
    monkeypatch.setattr(report_png, "write_plots", draw)
    monkeypatch.setattr(report_libraries, "find_spec", lambda name: name)
    path, page, plots = (tmp_path / name for name in ("profile.json", "page.html", "plots"))
    path.write_text(profile_text(profile))
    options = ("--html", page, "--png", plots)
    status, out, _ = call("--from", path, *options, config=False)
    assert status == 0 and out.endswith(f"report: {page}\nplots: 2 files in {plots}\n")
    assert drawn == [(profile, page), (profile, plots)]
    monkeypatch.setattr(report_libraries, "find_spec", lambda name: None)
    for option in options[::2]:
        status, out, err = call("--from", path, option, page, config=False)
        assert (status, out) == (2, "") and "a report needs plotly" in err
    assert len(drawn) == 2


def test_an_old_profile_is_read_without_an_engine(
    call: Call, profile: Profile, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile_text(profile))
    for options, message in (
        (["--live", "2"], "--live starts an engine, and --from reads "),
        (["--repeat-check"], "--repeat-check starts an engine"),
        (["--context-len", "9"], "--context-len starts an engine"),
        (["--set", "surface.repeats=1"], "--set starts an engine"),
        (["--trace-steps", "2"], "--trace-steps starts an engine"),
        (["--csv", str(path)], f"--csv is {path}, which is a file"),
    ):
        status, out, err = call("--from", path, *options, config=False)
        assert (status, out) == (2, "") and message in err
    path.write_text(profile_text(profile)[:-200])
    status, _, err = call("--from", path, config=False)
    assert status == 2 and f"error: {path}: not JSON at line" in err and err.count("\n") == 1
    status, _, err = call("--from", tmp_path / "none.json", config=False)
    assert status == 2 and "none.json: No such file or directory" in err
    status, _, err = call("--from", tmp_path, config=False)
    assert status == 2 and "is not a file" in err


def test_the_loop_s_own_runner_serves_a_traced_one(runner: Runner) -> None:
    """A named runner is whole: the loop finds what it asks a runner for."""
    named = named_runner(runner, lambda name: torch.no_grad())
    wanted = {name for name in vars(runner) if not name.startswith("_")}
    assert wanted <= set(vars(named))
    assert named.has_rich and named.prefill_chunk_sizes == runner.prefill_chunk_sizes
