"""`decodegrid serve` as a process: signals, exit statuses, and errors before it serves."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from decodegrid.engine.cli import main
from decodegrid.engine.tokenizer import Tokenizer

SCRIPT = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("toys", sys.argv[1])
toys = sys.modules["toys"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toys)
from decodegrid.engine.cli import main
from decodegrid.engine.llm import LLM
from decodegrid.engine.tokenizer import Tokenizer

class SlowRunner(toys.FakeRunner):
    def launch(self, *args):
        time.sleep(1000 if sys.argv[3] == "hangs" else 0.05)
        if sys.argv[3] == "dies":
            raise OSError("the device is gone")
        if sys.argv[3] == "waits" and sum(entry[0] == "decode" for entry in self.log) == 5:
            assert sys.stdin.readline() == "go on\\n"
        return super().launch(*args)

from decodegrid.engine import server_process
server_process._CLOSE_S = 0.3 if sys.argv[3] == "hangs" else server_process._CLOSE_S

def build(loaded):
    if sys.argv[3] == "fail":
        raise ValueError("no such\\nmodel")
    if sys.argv[3] == "slow":
        time.sleep(100)
    return LLM.from_runner(SlowRunner(max_model_len=400, drafts=1), Tokenizer(Path(sys.argv[2])))

from pathlib import Path
raise SystemExit(main(sys.argv[4:], build))
"""


class Process:
    """`decodegrid serve` with the toy model."""

    def __init__(self, tokenizer: Tokenizer, kind: str, overrides: tuple[str, ...]) -> None:
        conftest = Path(__file__).parents[1] / "conftest.py"
        words = ["serve", "--port", "0", "--set", "scheduler.max_model_len=400"]
        words += [word for item in overrides for word in ("--set", item)]
        command = [sys.executable, "-c", SCRIPT, str(conftest), str(tokenizer.path), kind, *words]
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        """Of standard error."""

    def wait_for(self, words: str) -> str:
        """The message of the first line that begins so."""
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.lines.append(line)
            message = str(json.loads(line)["message"]) if line.startswith("{") else line
            if message.startswith(words):
                return message
        raise AssertionError(f"no line {words!r} in {self.lines}")

    def go_on(self) -> None:
        """Let the toy that waits before its sixth step take it."""
        assert self.child.stdin is not None
        self.child.stdin.write("go on\n")
        self.child.stdin.flush()

    def wait(self) -> tuple[int, list[str]]:
        """Exit status and all lines of standard error."""
        out, err = self.child.communicate(timeout=600)
        assert out == ""
        return self.child.returncode, [*self.lines, *err.splitlines()]


@pytest.fixture
def spawn(tokenizer: Tokenizer) -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def start(kind: str, *overrides: str) -> Process:
        made.append(Process(tokenizer, kind, overrides))
        return made[-1]

    yield start
    for process in made:
        process.child.kill()
        process.child.wait()


def stream_of(process: Process, num_tokens: int) -> Iterator[Any]:
    url = process.wait_for("ready: ").removeprefix("ready: ")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    fields: Any = {"model": "tiny", "prompt": [20, 21], "temperature": 0}
    return iter(client.completions.create(**fields, max_tokens=num_tokens, stream=True))


def test_sigterm_lets_streams_end(spawn: Callable[..., Process], toy: Any, tokenizer: Any) -> None:
    process = spawn("waits")
    stream = stream_of(process, 40)
    text = next(stream).choices[0].text
    process.child.send_signal(signal.SIGTERM)
    process.wait_for("draining: 1 requests are open")
    process.go_on()
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == tokenizer.decode(toy.generate([20, 21], 40))
    status, lines = process.wait()
    assert status == 0
    assert all(json.loads(line)["time"] for line in lines)


def test_sigterm_ends_what_takes_too_long(spawn: Callable[..., Process]) -> None:
    process = spawn("plain", "server.drain_timeout_s=0.2")
    stream = stream_of(process, 390)
    next(stream)
    process.child.send_signal(signal.SIGTERM)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"
    assert process.wait()[0] == 1


def test_a_start_that_fails_or_is_stopped(spawn: Callable[..., Process]) -> None:
    failed = spawn("fail")
    status, lines = failed.wait()
    assert (status, lines[-1]) == (2, "decodegrid: error: no such; model")
    slow = spawn("slow")
    slow.wait_for("listening on http://")
    slow.child.send_signal(signal.SIGTERM)
    assert slow.wait()[0] == 0


@pytest.mark.parametrize(
    ("kind", "overrides", "words"),
    [
        ("dies", (), "OSError: the device is gone"),
        (
            "hangs",
            ("server.stall_s=0.3", "server.stall_exit_s=0.6"),
            "no step has finished for",
        ),
    ],
)
def test_an_engine_that_serves_nobody_ends_the_process(
    spawn: Callable[..., Process], kind: str, overrides: tuple[str, ...], words: str
) -> None:
    process = spawn(kind, *overrides)
    with pytest.raises(openai.APIError):
        next(stream_of(process, 40))
    status, lines = process.wait()
    assert status == 3
    messages = [json.loads(line)["message"] for line in lines]
    assert any(words in message for message in messages if message.startswith("the server ends"))


def test_what_cannot_start_says_so_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    def build(loaded: Any) -> Any:
        raise AssertionError("the engine is built")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, message in (
            (["--port", port], f"127.0.0.1:{port}: Address already in use"),
            (["--host", "no such host", "--port", "0"], "server.host 'no such host'"),
            (["--host", "a..b", "--port", "0"], "server.host 'a..b' is no name of a host"),
            (["--host", "a" * 64, "--port", "0"], "is no name of a host"),
            (["--port", "70000"], "--port is 70000"),
            (["--port", "0", "--set", "server.api_keys_file=none.txt"], "none.txt: No such file"),
            (["--set", "scheduler.engine_type=prompt"], "engine_type normal, got prompt"),
        ):
            assert main(["serve", *words], build) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("decodegrid: error: ") and message in line
