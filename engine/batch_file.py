"""Batch files in OpenAI's form: a request a line in, an answer a line out.

Owns the lines: what a request line holds, the order of the answers (that of the requests), and the
file that is written. A line that cannot be served gets an error in its place, and the others go on.
Answers are written to OUTPUT.partial as soon as those before them are there, and the file gets its
name when all are; a run that is cut off leaves what it had in OUTPUT.partial, which one run at a
time may hold.
"""

import fcntl
import io
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decodegrid.configs.sampling_section import SamplingSection
from decodegrid.configs.strict_json import load_json
from decodegrid.engine.batch_body import (
    URLS,
    BodyRequest,
    Kind,
    answer_body,
    read_body,
)
from decodegrid.engine.batch_logprobs import Json
from decodegrid.engine.body_fields import BodyError
from decodegrid.engine.cli_input import decode_utf8
from decodegrid.engine.llm import LLM
from decodegrid.engine.output_stream import OutputStream
from decodegrid.engine.profile_targets import check_file
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.request_output import RequestOutput

_LINE_FIELDS = {"custom_id", "method", "url", "body"}
_CUSTOM_ID = re.compile(r'"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line that holds something."""

    number: int
    """Counted from 1, empty lines too."""
    text: str

    @property
    def request_id(self) -> str:
        return f"batch-{self.number}"


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """How the lines of a batch came out."""

    num_done: int
    num_refused: int
    """Lines with an error in their place."""


class LineError(ValueError):
    """A line that is no request at all."""


def read_batch(path: Path) -> list[BatchLine]:
    """The lines of a batch file, not looked into.

    Raises OSError, RequestError for a file that is not UTF-8 or has nothing in it.
    """
    text = decode_utf8(str(path), path.read_bytes())
    lines = [
        BatchLine(number, line)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not lines:
        raise RequestError(f"{path}: no request in it")
    return lines


def partial_path(output: Path) -> Path:
    """Where a batch's answers stand until all are there."""
    return output.with_name(output.name + ".partial")


def check_output(source: Path, output: Path, *, overwrite: bool) -> None:
    """Refuse an output that cannot or should not be written; raises ValueError."""
    for path in (output, partial_path(output)):
        if path.exists() and source.exists() and path.samefile(source):
            raise RequestError(f"{path} is the input itself")
        if path.is_dir():
            raise RequestError(f"{path} is a directory")
        if path.exists() and not overwrite:
            raise _exists(path)
    if not output.parent.is_dir():
        raise RequestError(f"{output.parent}: no such directory")
    check_file("OUTPUT", output)


def run_batch(
    llm: LLM,
    lines: Sequence[BatchLine],
    output: Path,
    defaults: SamplingSection,
    *,
    overwrite: bool = False,
) -> BatchCounts:
    """Answer every line and write `output`. defaults: see read_body. overwrite: whether there may
    be an older output, or what a run that was cut off left of one.

    Raises OSError, and RequestError where another run has come between.
    """
    batch = _Batch(llm, defaults)
    for line in lines:
        batch.add(line)
    partial = partial_path(output)
    with _hold(partial, output, overwrite=overwrite) as file:
        for answer in batch.answers():
            _append(file, json.dumps(answer) + "\n", partial)
        os.fsync(file.fileno())
        # Within the lock: the name is given away by whoever holds the file.
        os.replace(partial, output)
    return BatchCounts(batch.num_done, len(lines) - batch.num_done)


def _exists(path: Path) -> RequestError:
    return RequestError(f"{path} exists; --overwrite replaces it")


def _hold(partial: Path, output: Path, *, overwrite: bool) -> io.FileIO:
    """Open OUTPUT.partial, empty and locked: two runs would mix their answers in it.

    The lock ends with the process, however it ends. Raises RequestError where another run has the
    file, or where without `overwrite` one of the two has come to be since they were looked for.
    """
    try:
        flags = os.O_WRONLY | os.O_CREAT | (0 if overwrite else os.O_EXCL)
        file = io.FileIO(os.open(partial, flags, 0o666), "w")
    except FileExistsError:
        raise _exists(partial) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The run that had the lock before may have given the file its name meanwhile.
        if not partial.exists() or not os.path.samestat(os.fstat(file.fileno()), partial.stat()):
            raise BlockingIOError
        if output.exists() and not overwrite:
            partial.unlink()
            raise _exists(output)
        file.truncate(0)
    except BlockingIOError:
        file.close()
        raise RequestError(f"{partial} is written by another run") from None
    except BaseException:
        file.close()
        raise
    return file


def _append(file: io.FileIO, text: str, path: Path) -> None:
    """Write a text now. Raises OSError with the file's name."""
    rest = memoryview(text.encode())
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


class _Batch:
    """The lines of a batch on their way to answers."""

    def __init__(self, llm: LLM, defaults: SamplingSection) -> None:
        self._llm = llm
        self._defaults = defaults
        self._answers: list[dict[str, Json] | None] = []
        """By line; None while its request has not ended."""
        self._custom_ids: list[str | None] = []
        self._seen: set[str] = set()
        self._requests: dict[int, BodyRequest] = {}
        self._streams: list[OutputStream] = []
        self.num_done = 0

    def add(self, line: BatchLine) -> None:
        """Check a line: it becomes a request, or its answer is an error."""
        custom_id: str | None = None
        answer: dict[str, Json] | None = None
        try:
            custom_id = _readable_id(line)
            item = _parse(line)
            custom_id = _custom_id(item)
            self._check_unused(custom_id)
            self._add_request(line, item)
        except LineError as error:
            detail = {"code": "invalid_line", "message": f"line {line.number}: {error}"}
            answer = _answer(line.request_id, custom_id, None, detail)
        except RequestError as error:
            param = error.param if isinstance(error, BodyError) else None
            body = {
                "error": {
                    "message": str(error),
                    "type": "invalid_request_error",
                    "param": param,
                    "code": None,
                }
            }
            answer = _answer(line.request_id, custom_id, _response(400, line.request_id, body))
        self._answers.append(answer)
        self._custom_ids.append(custom_id)

    def answers(self) -> Iterator[dict[str, Json]]:
        """The answers in the order of the lines, each as soon as those before it are there."""
        num_given = 0
        for piece in self._llm.stream_table.run(self._streams):
            if piece.output is None:
                continue
            self._answers[piece.index] = self._done(piece.index, piece.output)
            while num_given < len(self._answers):
                answer = self._answers[num_given]
                if answer is None:
                    break
                yield answer
                num_given += 1
        yield from (answer for answer in self._answers[num_given:] if answer is not None)

    def _check_unused(self, custom_id: str) -> None:
        if custom_id in self._seen:
            raise LineError(f"custom_id {custom_id!r} was used before")
        self._seen.add(custom_id)

    def _add_request(self, line: BatchLine, item: dict[str, Json]) -> None:
        kind = _check_target(item)
        tokenizer = self._llm.tokenizer
        index = len(self._answers)
        request = read_body(kind, item.get("body"), tokenizer, self._defaults)
        stream = self._llm.stream_table.build(
            request.prompt, request.params, index=index, request_id=line.request_id
        )
        self._requests[index] = request
        self._streams.append(stream)

    def _done(self, index: int, output: RequestOutput) -> dict[str, Json]:
        request = self._requests.pop(index)
        failed = [completion.error for completion in output.outputs if completion.error is not None]
        if failed:
            error = {"message": failed[0], "type": "server_error", "param": None, "code": None}
            response = _response(500, output.request_id, {"error": error})
            return _answer(output.request_id, self._custom_ids[index], response)
        self.num_done += 1
        body = answer_body(request, output, int(time.time()), self._llm.tokenizer)
        response = _response(200, output.request_id, body)
        return _answer(output.request_id, self._custom_ids[index], response)


def _parse(line: BatchLine) -> dict[str, Json]:
    try:
        item = load_json(line.text)
    except ValueError as error:
        raise LineError(str(error)) from None
    if not isinstance(item, dict):
        raise LineError("not an object")
    return item


def _custom_id(item: dict[str, Json]) -> str:
    custom_id = item.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("custom_id must be a string that is not empty")
    return custom_id


def _readable_id(line: BatchLine) -> str | None:
    """The custom_id that a line has, whatever else is wrong with it: the answer goes to it. None
    where there is none, or more than one."""
    found = _CUSTOM_ID.findall(line.text)
    if len(found) != 1:
        return None
    try:
        value: str = json.loads(found[0])
    except ValueError:
        return None
    return value or None


def _check_target(item: dict[str, Json]) -> Kind:
    """What the line asks for; raises BodyError."""
    for name in item:
        if name not in _LINE_FIELDS:
            raise BodyError(f"{name} is not supported", name)
    if item.get("method") != "POST":
        raise BodyError(f"method must be POST, got {item.get('method')!r}", "method")
    url = item.get("url")
    kind = URLS.get(url) if isinstance(url, str) else None
    if kind is None:
        raise BodyError(f"url must be one of {', '.join(URLS)}, got {url!r}", "url")
    return kind


def _response(status_code: int, request_id: str, body: dict[str, Json]) -> dict[str, Json]:
    return {"status_code": status_code, "request_id": request_id, "body": body}


def _answer(
    request_id: str,
    custom_id: str | None,
    response: dict[str, Json] | None,
    error: dict[str, Any] | None = None,
) -> dict[str, Json]:
    return {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
