"""What a page shows, done: its commands, requests and programs, in their order.

Owns which of them are run, and what the others are held to. A line of a shell is refused unless it
is understood. Commands of the program and of make are parsed by what parses them, and run where
that is cheap; a request of curl is sent to a server of the toy model, and its status must be 200 or
the one that the comment before it names; a Python block is run, with the toy behind `LLM`. A block
`json answer` is compared with the answer of the last request, `json chunk` with the events of the
last stream, `json log` with a line of the log; one `json POST PATH` is sent.
"""

import argparse
import contextlib
import importlib
import io
import json
import logging.handlers
import queue
import re
import shlex
import subprocess
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

import decodegrid
from decodegrid.configs.load import load_config
from decodegrid.engine.cli import build_parser, main
from decodegrid.engine.server_front import OPEN_PATHS
from decodegrid.engine.server_log import JsonFormatter

URL = "http://127.0.0.1:8000"
ACCESS = "decodegrid.access"
SHELLS = ("bash", "sh", "console")
CHEAP_VERBS = ("config", "inspect", "--version")
SYSTEM = ("docker", "install", "journalctl", "openssl", "systemctl", "useradd")
"""Commands whose lines only have to be shell, and to name files that are there."""
ENTRY = ("decodegrid", ".venv/bin/decodegrid")
PYTHON = ".venv/bin/python"


@dataclass
class Command:
    """A command of a shell block."""

    words: list[str]
    status: int
    """Exit status, or HTTP status, that it must have."""
    output: list[str]
    """Lines that it must print, in this order; `...` stands for anything."""


class Unknown(AssertionError):
    """Something on a page that nothing checks."""


def read_commands(text: str) -> Iterator[Command]:
    """The commands of a block. In one with prompts ($) the other lines are output."""
    lines = text.splitlines()
    has_prompts = any(line.startswith("$ ") for line in lines)
    status, held, found = 0, "", None
    for line in lines:
        if held:
            held += "\n" + line
        elif has_prompts and not line.startswith("$ "):
            assert found is not None, f"output before a command: {line}"
            found.output.append(line)
            continue
        elif line.startswith("#") or not line.strip():
            named = re.search(r"status (\d+)", line)
            status = int(named[1]) if named else status
            continue
        else:
            held = line.removeprefix("$ ") if has_prompts else line
        words = _words(held)
        if words is None:
            continue
        if found is not None:
            yield found
        named = re.search(r"#[^'\"]*status (\d+)", held)
        found, status, held = Command(words, int(named[1]) if named else status, []), 0, ""
    assert not held, f"the line goes on behind the block: {held}"
    if found is not None:
        yield found


def _words(line: str) -> list[str] | None:
    """The words of a line; None where it goes on."""
    if line.endswith("\\"):
        return None
    try:
        return shlex.split(line.replace("\\\n", " "), comments=True)
    except ValueError:  # a quotation is open
        return None


def parse_curl(words: list[str]) -> argparse.Namespace:
    """The options of curl that pages may use."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for flag in ("-s", "-S", "-N", "-i"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("-X", "--request", dest="method")
    parser.add_argument("-H", "--header", action="append", default=[], dest="headers")
    parser.add_argument("-d", "--data", dest="data")
    parser.add_argument("url")
    return parser.parse_args(words)


class PageRun:
    """Runs the blocks of a page, one behind the other."""

    def __init__(self, root: Path, server: Any, make_toy: Callable[[], Any]) -> None:
        self._root, self._server, self._make_toy = root, server, make_toy
        self._names: dict[str, Any] = {"__name__": "page"}
        self._answer: Any = None
        self._events: list[Any] = []
        self.num_run = 0

    def run(self, block: Any) -> None:
        if block.language in SHELLS:
            for command in read_commands(block.text):
                self.command(command)
        elif block.language == "python":
            self._python(block)
        elif block.language == "json":
            self._json(block)

    def command(self, command: Command) -> None:
        """Run a command, or hold it to what would run it."""
        words = list(command.words)
        while "=" in words[0] and words[0].partition("=")[0].isupper():
            words.pop(0)
        if words[-1] == "&":
            words.pop()
        first, rest, out = words[0], words[1:], ""
        if first == PYTHON and rest[:2] == ["-m", "decodegrid"]:
            first, rest = ENTRY[0], rest[2:]
        if first in ENTRY:
            out = self._cli(rest, command)
        elif first == "curl":
            self._curl(rest, command)
        elif first == "make":
            self._make(rest)
        elif first == PYTHON and rest[:1] == ["-m"]:
            self._module(rest[1], rest[2:])
        elif first in SYSTEM or first.startswith("benchmarks/"):
            self._system(words)
        else:
            raise Unknown(f"nothing checks the command {first}")
        self._compare_output(out, command)

    def _cli(self, words: list[str], command: Command) -> str:
        """A command of this program; what it printed, where it was run."""
        target: Path | None = None
        if ">" in words:
            place = words.index(">")
            target, words = Path(words[place + 1]), words[:place]
        is_cheap = words[0] in CHEAP_VERBS or "--help" in words
        is_cheap |= words[0] == "plan" and "--surface" in words
        is_cheap |= words[0] == "profile" and "--from" in words
        if not is_cheap:
            assert build_parser().parse_args(words).run, words
            assert not command.output, f"{words} is not run: nothing checks its output"
            return ""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(words)
        assert status == command.status, f"{words}: status {status}, {err.getvalue()}"
        self.num_run += 1
        if target is not None:
            target.write_text(out.getvalue())
        return out.getvalue() + err.getvalue()

    def _compare_output(self, text: str, command: Command) -> None:
        """Every line of the page is there, in the page's order."""
        found = iter(" ".join(line.split()) for line in text.splitlines())
        for line in command.output:
            pattern = re.escape(" ".join(line.split())).replace(r"\.\.\.", ".*")
            is_there = any(re.fullmatch(pattern, other) for other in found)
            assert is_there or line.strip() == "...", f"not printed: {line!r}\n{text}"

    def _make(self, words: list[str]) -> None:
        text = (self._root / "Makefile").read_text()
        targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", text, re.MULTILINE))
        variables = set(re.findall(r"^([A-Z_]+) \?= ", text, re.MULTILINE))
        for word in words:
            name, equals, _ = word.partition("=")
            assert name in (variables if equals else targets), f"make {word}"
        self.num_run += 1

    def _module(self, name: str, words: list[str]) -> None:
        """A module's own parser takes the words; nothing behind it is run."""
        if name == "pip":
            extras = tomllib.loads((self._root / "pyproject.toml").read_text())["project"]
            for named in re.findall(r"\[([\w,-]+)\]", " ".join(words)):
                assert set(named.split(",")) <= extras["optional-dependencies"].keys(), named
            return
        folder = name.split(".")[0]
        assert (self._root / folder).is_dir(), f"{name} is no module of the project"
        module = importlib.import_module(name)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(_ParsedError):
            patch.setattr("sys.argv", [name, *words])
            patch.setattr(argparse.ArgumentParser, "parse_args", _parse_and_stop)
            module.main()
        self.num_run += 1

    def _system(self, words: list[str]) -> None:
        """Shell that is no program of the project's: its files are there, its syntax is right."""
        subprocess.run(["bash", "-n", "-c", shlex.join(words)], check=True, timeout=60)
        for word in words:
            if word.startswith(("docs/", "benchmarks/")):
                assert (self._root / word).is_file(), word
        if words[:2] == ["docker", "run"] and "decodegrid" in words:
            rest = words[words.index("decodegrid") + 1 :]
            assert not rest or build_parser().parse_args(rest).run

    def _curl(self, words: list[str], command: Command) -> None:
        asked = parse_curl(words)
        method = asked.method or ("GET" if asked.data is None else "POST")
        headers = dict(header.split(": ", 1) for header in asked.headers)
        if asked.data is not None:
            # As curl does.
            headers.setdefault("Content-Type", "application/x-www-form-urlencoded")
        assert asked.url.startswith(URL + "/"), asked.url
        self._send(method, asked.url.removeprefix(URL), headers, asked.data, command.status or 200)

    def _send(
        self, method: str, path: str, headers: dict[str, str], data: str | None, status: int
    ) -> None:
        content = None if data is None else data.encode()
        with self._traffic(path == "/profile"):
            found = httpx2.request(
                method, self._server.url + path, headers=headers, content=content, timeout=120,
                verify=False,  # plain HTTP: no certificates
            )  # fmt: skip
        assert found.status_code == status, f"{method} {path}: {found.status_code} {found.text}"
        kind = found.headers["content-type"].split(";")[0]
        self._answer = found.json() if kind == "application/json" else None
        if kind == "text/event-stream":
            datas = [x.removeprefix("data: ") for x in found.text.splitlines() if "data: " in x[:6]]
            self._events = [json.loads(data) for data in datas if data != "[DONE]"]
        assert kind != "application/json" or path in OPEN_PATHS or self._answer
        self.num_run += 1

    @contextlib.contextmanager
    def _traffic(self, is_wanted: bool) -> Iterator[None]:
        """Requests meanwhile: a trace is of steps."""
        is_over = threading.Event()

        def ask() -> None:
            body = {"prompt": "a", "max_tokens": 50, "ignore_eos": True}
            while not is_over.is_set():
                assert self._server.post("/v1/completions", body).status_code == 200

        thread = threading.Thread(target=ask)
        if is_wanted:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            if is_wanted:
                thread.join(60)

    def _python(self, block: Any) -> None:
        def make_llm(config: str | None = None, overrides: Any = ()) -> Any:
            load_config(None if config is None else self._root / config, list(overrides))
            return self._make_toy()

        source = block.text.replace(URL, self._server.url)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decodegrid, "LLM", make_llm, raising=False)
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(source, block.place, "exec"), self._names)
        self.num_run += 1

    def _json(self, block: Any) -> None:
        value = json.loads(block.text)
        kind, *rest = block.words or ("value",)
        if kind == "answer":
            assert self._answer is not None, f"{block.place}: no answer before it"
            if "error" in value:
                assert {**self._answer, "request_id": ""} == {**value, "request_id": ""}
            check_shape(value, self._answer, block.place)
        elif kind == "chunk":
            problems = [shape_problem(value, event, block.place) for event in self._events]
            assert None in problems, problems
        elif kind == "log":
            check_shape(value, self._log_line(value["path"]), block.place)
        elif kind == "POST":
            headers = {"Content-Type": "application/json"}
            self._send("POST", rest[0], headers, block.text, 200)
        else:
            assert kind == "value", f"{block.place}: json {kind}"

    def _log_line(self, path: str) -> Any:
        """The line of the access log for a GET; lines come behind answers, others' too."""
        lines: queue.Queue[logging.LogRecord] = queue.Queue()
        handler, access = logging.handlers.QueueHandler(lines), logging.getLogger(ACCESS)
        handler.addFilter(lambda record: vars(record)["fields"]["path"] == path)
        level = access.level
        access.addHandler(handler)
        access.setLevel(logging.INFO)
        try:
            assert self._server.get(path)[0] == 200
            return json.loads(JsonFormatter().format(lines.get(timeout=60)))
        finally:
            access.removeHandler(handler)
            access.setLevel(level)


class _ParsedError(Exception):
    """Arguments were taken."""


_PARSE_ARGS = argparse.ArgumentParser.parse_args


def _parse_and_stop(parser: argparse.ArgumentParser, words: Any = None) -> Any:
    _PARSE_ARGS(parser, words)
    raise _ParsedError


def shape_problem(page: Any, real: Any, where: str) -> str | None:
    """How a value of a page differs from a real one in its fields and kinds."""
    if isinstance(page, dict) and isinstance(real, dict):
        if page and not any(key.isidentifier() for key in (*page, *real)):  # keys are data
            page, real = {"": [*page.values()]}, {"": [*real.values()]}
        if page.keys() != real.keys():
            return f"{where}: {sorted(page.keys() ^ real.keys())} in one of the two only"
        pairs = [(f"{where}.{key}", page[key], real[key]) for key in page]
    elif isinstance(page, list) and isinstance(real, list):
        if bool(page) != bool(real):
            return f"{where}: {len(page)} and {len(real)} items"
        pairs = [(f"{where}[]", a, b) for a, b in zip(page, real, strict=False)]
    else:
        numbers = (int, float)
        kinds = [float if type(x) in numbers else type(x) for x in (page, real)]
        return None if kinds[0] is kinds[1] else f"{where}: {page!r} and {real!r}"
    return next((found for name, a, b in pairs if (found := shape_problem(a, b, name))), None)


def check_shape(page: Any, real: Any, where: str) -> None:
    problem = shape_problem(page, real, where)
    assert problem is None, problem
