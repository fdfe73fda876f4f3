"""`POST /profile`: traces of an engine that serves meanwhile."""

import gzip
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decodegrid.engine.async_llm import AsyncLLM
from decodegrid.engine.cli import main
from decodegrid.engine.live_trace import LiveTrace
from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer

VOCAB_SIZE = 272
LONG: Any = {"prompt": "abc", "max_tokens": 390, "ignore_eos": True}


class Call(threading.Thread):
    """A request in a thread; its answer when it is joined."""

    def __init__(self, server: Any, path: str, body: Any) -> None:
        super().__init__(daemon=True)
        self._work = lambda: server.post(path, body)
        self._answer: Any = None
        self.start()

    def run(self) -> None:
        self._answer = self._work()

    def answer(self) -> Any:
        self.join(60)
        assert self._answer is not None
        return self._answer


def wait_for_commands(server: Any, count: int = 1) -> None:
    """Until the engine, which stands before a step, has been told so many things, such as to begin
    a trace: an order may still have to be loaded when the server is said to be busy with it."""
    engine = server.state.health.engine
    server.wait_until(lambda: len(engine._commands) == count)


def test_it_is_off_unless_a_directory_is_named(start: Any) -> None:
    server, _, _ = start()
    answer = server.post("/profile", {"num_steps": 3})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "traces are off: server.profile_dir is empty"


def test_a_trace_of_a_serving_engine_has_its_regions_by_name(
    serve: Any,
    make_model: Callable[..., Any],
    make_eager_runner: Callable[..., Any],
    tokenizer: Tokenizer,
    layer_changes: Any,
    tmp_path: Path,
) -> None:
    model = make_model(vocab_size=VOCAB_SIZE, **layer_changes[2])
    runner = make_eager_runner(model, rich=True)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM.from_runner(make_eager_runner(model, rich=True), tokenizer) as alone:
        (want,) = alone.generate(["ab"], params)
    graphs = runner.graphs
    server = serve(
        lambda: LLM.from_runner(runner, tokenizer),
        f"server.profile_dir={tmp_path / 'traces'}",
        "scheduler.max_model_len=64",
        "scheduler.max_num_reqs=3",
    )
    profile = Call(server, "/profile", {"num_steps": 4})
    body = {"prompt": "ab", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    texts = []
    while profile.is_alive():
        texts.append(server.post("/v1/completions", body).json()["choices"][0]["text"])
    found = profile.answer().json()
    # What was served under the trace is what is served without it.
    assert set(texts) == {want.outputs[0].text} and runner.graphs is graphs
    assert found["num_steps"] >= 4 and found["is_complete"] is True and found["seconds"] > 0
    path = Path(found["path"])
    assert path.parent == tmp_path / "traces" and path.stat().st_size == found["num_bytes"]
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    times = {row["name"]: row for row in found["times"]}
    regions = {node.name for graph in graphs.fused.values() for node in graph.nodes}
    assert len(regions & names) > 5 and regions & set(times)
    # A turn of the engine that only takes in or ends requests has its range too.
    assert times["step"]["count"] >= found["num_steps"]
    keys = {str(graph.key) for graph in graphs.fused.values()}
    assert keys & set(times), "no replay has the name of its graph"
    totals = [row["total_ms"] for row in found["times"]]
    assert totals == sorted(totals, reverse=True) and totals[0] > 0
    assert server.stop().status == 0


def test_one_at_a_time_and_never_on_the_event_loop(
    start: Any, hold: Any, tmp_path: Path, idle: Any
) -> None:
    server, llm, runner = start(f"server.profile_dir={tmp_path}")
    gate = hold(runner, "launch")
    request = Call(server, "/v1/completions", LONG)
    server.wait_until(lambda: gate.num_waiting == 1)
    profile = Call(server, "/profile", {"num_steps": 2, "timeout_s": 50})
    # The engine cannot begin; everything else answers.
    server.wait_until(lambda: server.state.profiler.is_busy)
    refused = server.post("/profile", b"")
    assert refused.status_code == 409
    assert refused.json()["error"]["message"] == "another trace is being made"
    assert server.get("/live")[0] == 200 and server.get("/ready")[0] == 200
    wait_for_commands(server)
    gate.open()
    found = profile.answer().json()
    assert found["num_steps"] >= 2 and Path(found["path"]).is_file()
    assert request.answer().json()["usage"]["completion_tokens"] == 390
    gate = hold(runner, "launch")
    again = Call(server, "/v1/completions", LONG)
    server.wait_until(lambda: gate.num_waiting == 1)
    profile = Call(server, "/profile", {"num_steps": 1})
    wait_for_commands(server)
    gate.open()
    assert profile.answer().status_code == 200
    again.answer()
    assert len(list(tmp_path.iterdir())) == 2 and idle(llm)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"num_steps": 0}, "num_steps", "allowed are 1..200"),
        ({"num_steps": 201}, "num_steps", "allowed are 1..200"),
        ({"num_steps": True}, "num_steps", "whole number"),
        ({"num_steps": 2.0}, "num_steps", "whole number"),
        ({"timeout_s": 0}, "timeout_s", "above 0 up to 300"),
        ({"timeout_s": 1e9}, "timeout_s", "above 0 up to 300"),
        ({"timeout_s": "1"}, "timeout_s", "a number"),
        ({"steps": 1}, "steps", "steps is not supported"),
        ([], None, "must be a JSON object"),
        (b"{", None, "the body is"),
    ],
)
def test_what_is_refused(trace_server: Any, body: Any, param: str | None, words: str) -> None:
    answer = trace_server.post("/profile", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]


@pytest.fixture(scope="module")
def trace_server(
    serve_shared: Any,
    make_runner: Callable[..., Any],
    tokenizer: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    directory = tmp_path_factory.mktemp("traces")
    return serve_shared(
        lambda: LLM.from_runner(make_runner(max_model_len=400), tokenizer),
        f"server.profile_dir={directory}",
        "scheduler.max_model_len=400",
    )


def test_nothing_to_do_leaves_no_file(start: Any, tmp_path: Path) -> None:
    server, _, _ = start(f"server.profile_dir={tmp_path}")
    for _ in range(2):
        answer = server.post("/profile", {"timeout_s": 0.1})
        assert answer.status_code == 504
        assert answer.json()["error"]["message"] == "the engine had nothing to do for 0.1 s"
    assert not list(tmp_path.iterdir())


def test_a_client_that_goes_ends_its_trace(start: Any, tmp_path: Path, hold: Any) -> None:
    server, _, runner = start(f"server.profile_dir={tmp_path}")
    gate = hold(runner, "launch")
    request = Call(server, "/v1/completions", LONG)
    server.wait_until(lambda: gate.num_waiting == 1)
    data = b"POST /profile HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    connection = server.connect(data)
    wait_for_commands(server)
    connection.close()
    wait_for_commands(server, 2)  # to begin it and to end it
    gate.open()
    request.answer()
    server.wait_until(lambda: not server.state.profiler.is_busy)
    assert server.post("/profile", {"timeout_s": 0.1}).status_code == 504
    assert not list(tmp_path.iterdir()) and server.stop().status == 0


def test_a_key_is_asked_for(start: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-0123456789-0123456789\n")
    server, _, _ = start(f"server.profile_dir={tmp_path}", f"server.api_keys_file={keys}")
    assert server.post("/profile", {}).status_code == 401


def test_an_engine_that_fails_under_a_trace(start: Any, tmp_path: Path, hold: Any) -> None:
    server, _, runner = start(f"server.profile_dir={tmp_path}")
    gate = hold(runner, "launch")
    request = Call(server, "/v1/completions", LONG)
    server.wait_until(lambda: gate.num_waiting == 1)
    profile = Call(server, "/profile", {"num_steps": 200})
    wait_for_commands(server)

    def fail(*args: Any) -> Any:
        raise OSError("the device is gone")

    runner.launch = fail
    gate.open()
    assert profile.answer().status_code == 500 and request.answer().status_code == 500
    server.wait_until(lambda: server.end is not None)
    assert server.end.status == 3 and not list(tmp_path.iterdir())


def test_a_second_trace_ends_at_once(make_runner: Callable[..., Any], tokenizer: Tokenizer) -> None:
    engine = AsyncLLM(LLM.from_runner(make_runner(), tokenizer))
    first, second = LiveTrace(5), LiveTrace(5)
    engine.trace(first)
    engine.trace(second)
    with pytest.raises(RuntimeError, match="another trace runs"):
        second.future.result(60)
    assert not first.future.done()
    engine.end_trace(first)
    assert first.future.result(60).num_steps == 0
    third = LiveTrace(5)
    engine.trace(third)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        third.future.result(60)


def test_a_directory_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def build(loaded: Any) -> Any:
        raise AssertionError("the engine is built")

    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "traces", tmp_path / "file"):
        words = ["serve", "--port", "0", "--set", f"server.profile_dir={path}"]
        assert main(words, build) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"decodegrid: error: {path}: Not a directory"
