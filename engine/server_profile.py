"""`POST /profile`: a trace of the next steps of the engine, while it serves.

Owns what may be asked for, that one trace runs at once, and where traces go. The engine's thread
records, a thread of its own writes; the event loop only waits. Data flow: body -> LiveTrace ->
a file in server.profile_dir, and its path and the times of its regions as the answer.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from decodegrid.engine.async_llm import AsyncLLM
from decodegrid.engine.body_fields import BodyError
from decodegrid.engine.sampling_checks import show
from decodegrid.engine.server_errors import ApiError, server_error
from decodegrid.engine.server_generate import client_gone, read_data
from decodegrid.engine.server_state import ServerState, read_json

if TYPE_CHECKING:
    from decodegrid.engine.live_trace import LiveTrace, RecordedTrace

MAX_STEPS: Final = 200
"""Of a trace: on a CPU a step leaves about a hundred kilobytes."""
MAX_SECONDS: Final = 300.0
_STEPS: Final = 20
_SECONDS: Final = 60.0
_GRACE_S: Final = 30.0
"""For the engine to end a trace: its step may take a while, and so may the profiler."""
_NUM_ROWS: Final = 40
"""Of the table."""


@dataclass(frozen=True, slots=True)
class _Order:
    """What a body asks for."""

    num_steps: int = _STEPS
    timeout_s: float = _SECONDS


class Profiler:
    """The traces of one server; used from its event loop."""

    def __init__(self, directory: Path | None) -> None:
        """Make the directory and try to write there; None: traces are off. Raises OSError."""
        self._directory = directory
        self.is_busy = False
        """Whether a trace is made now."""
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=directory):
                pass
        self._writer = ThreadPoolExecutor(1, "decodegrid-profile")

    async def answer(self, state: ServerState, http: Request) -> Response:
        """Trace as the body says. A client that goes away ends its trace, and no file is written.

        Raises ApiError: 404 where traces are off, 400 for the body, 409 while one is made, 503
        where the engine serves nobody or does not come back, 504 where it had nothing to do.
        """
        if self._directory is None:
            raise ApiError(
                404, "traces are off: server.profile_dir is empty", code="profiling_is_off"
            )
        engine = state.health.require()
        order = _read(await read_data(http))
        if self.is_busy:
            raise ApiError(409, "another trace is being made", code="profiling_is_busy")
        self.is_busy = True
        # A task of its own, which outlives the client: the trace has to be ended.
        work = asyncio.create_task(self._trace(engine, order, self._directory))
        gone = asyncio.create_task(client_gone(http.receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
        return await work

    def close(self) -> None:
        """End the thread, which waits for nothing but its work."""
        self._writer.shutdown(wait=False, cancel_futures=True)

    async def _trace(self, engine: AsyncLLM, order: _Order, directory: Path) -> Response:
        try:
            loop = asyncio.get_running_loop()
            make = await loop.run_in_executor(self._writer, _load_traces)
            trace = make(order.num_steps)
            recorded = await _record(engine, trace, order)
            if not recorded.num_steps:
                raise ApiError(
                    504, f"the engine had nothing to do for {order.timeout_s:g} s", code="timeout"
                )
            name = f"trace-{datetime.now(UTC):%Y%m%d-%H%M%S}-{token_hex(3)}.json.gz"
            write = partial(_write, recorded, directory / name, order)
            return JSONResponse(await loop.run_in_executor(self._writer, write))
        finally:
            self.is_busy = False


async def _record(engine: AsyncLLM, trace: "LiveTrace", order: _Order) -> "RecordedTrace":
    """Run a trace, which has ended when this does unless the engine hangs."""
    engine.trace(trace)
    result = asyncio.wrap_future(trace.future)
    try:
        await asyncio.wait({result}, timeout=order.timeout_s)
    finally:
        engine.end_trace(trace)
        if not result.done():
            # Also where nobody waits any more: until it has ended no other can begin.
            await asyncio.wait({result}, timeout=_GRACE_S)
    if not result.done():
        message = f"the engine did not end the trace within {_GRACE_S:g} s"
        raise ApiError(503, message, kind="server_error", code="unavailable", retry_after_s=60)
    error = result.exception()
    if error is not None:
        raise server_error(f"the trace failed: {type(error).__name__}") from error
    return result.result()


def _load_traces() -> "type[LiveTrace]":
    from decodegrid.engine.live_trace import LiveTrace  # torch.profiler takes a while

    return LiveTrace


def _write(recorded: "RecordedTrace", path: Path, order: _Order) -> dict[str, Any]:
    """Write the file; the answer's body."""
    try:
        rows = recorded.write(path)
    except OSError as error:
        raise server_error(f"{path.name}: {error.strerror or error}") from error
    return {
        "path": str(path),
        "num_bytes": path.stat().st_size,
        "num_steps": recorded.num_steps,
        "is_complete": recorded.num_steps >= order.num_steps,
        "seconds": round(recorded.seconds, 6),
        "times": [asdict(row) for row in rows[:_NUM_ROWS]],
    }


def _read(data: bytes) -> _Order:
    """The order of a body, which may be empty; raises ApiError and BodyError."""
    if not data.strip():
        return _Order()
    body = read_json(data)
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name in body:
        if name not in ("num_steps", "timeout_s"):
            raise BodyError(f"{name} is not supported", name)
    num_steps = body.get("num_steps", _STEPS)
    if isinstance(num_steps, bool) or not isinstance(num_steps, int):
        raise BodyError("num_steps must be a whole number", "num_steps")
    if not 1 <= num_steps <= MAX_STEPS:
        raise BodyError(f"num_steps is {num_steps}; allowed are 1..{MAX_STEPS}", "num_steps")
    seconds = body.get("timeout_s", _SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise BodyError("timeout_s must be a number", "timeout_s")
    if not 0 < seconds <= MAX_SECONDS:
        raise BodyError(
            f"timeout_s is {show(seconds)}; allowed are numbers above 0 up to {MAX_SECONDS:g}",
            "timeout_s",
        )
    return _Order(num_steps, float(seconds))
