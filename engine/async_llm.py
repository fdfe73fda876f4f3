"""An LLM whose steps run in a thread of their own, for callers in event loops and other threads.

Owns that thread, the commands to it and the sinks that its pieces go to. What a request is, the
stream table owns. Data flow: callers check a prompt and leave a command; between two steps the
thread takes the commands, runs a step and puts its pieces into the sinks, where nobody makes it
wait.
"""

import asyncio
import atexit
import logging
import threading
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from time import monotonic
from types import TracebackType
from typing import Self

from decodegrid.engine.admission import EngineLimits
from decodegrid.engine.async_sinks import FutureSink, Mailbox, Sink, WakeUps
from decodegrid.engine.engine_snapshot import EngineSnapshot, take_snapshot
from decodegrid.engine.llm import LLM
from decodegrid.engine.output_stream import OutputStream
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.request_output import RequestOutput, StreamOutput
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.step_trace import StepTrace, TraceSlot
from decodegrid.engine.stream_table import Prompt
from decodegrid.engine.tokenizer import Tokenizer

_LOG = logging.getLogger("decodegrid.engine")
_LOG.addHandler(logging.NullHandler())
_CLOSED = "this AsyncLLM is closed; make a new one"


class AsyncLLM:
    """Takes over an LLM, which nobody else may use from then on, and closes it at its end.

    Every method may be called from any thread. After close() those that take requests raise
    RuntimeError; after an error of the engine they raise that error, and so do all open requests.
    """

    def __init__(self, llm: LLM) -> None:
        if not isinstance(llm, LLM):
            raise TypeError(f"AsyncLLM takes an LLM, as in AsyncLLM(LLM(config)), got {llm!r}")
        llm.require_whole("AsyncLLM")
        self._llm = llm
        self._table = llm.stream_table
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._sinks: dict[str, Sink] = {}
        """Of the open requests; the names of ended ones are free at once."""
        self._wakes = WakeUps()
        self._traces = TraceSlot()
        self._is_closing = False
        self._busy_since: float | None = None
        """When the thread began what it does, by the monotonic clock; None while it waits."""
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._thread = threading.Thread(target=self._serve, name="decodegrid-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def num_open(self) -> int:
        """Requests that wait or run."""
        with self._changed:
            return len(self._sinks)

    @property
    def error(self) -> BaseException | None:
        """What the engine failed with; None while it works."""
        return self._error

    @property
    def busy_s(self) -> float:
        """Seconds that the present step takes already; 0 while there is nothing to do."""
        since = self._busy_since
        return 0.0 if since is None else monotonic() - since

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    @property
    def limits(self) -> EngineLimits:
        return self._llm.limits

    def is_open(self, request_id: str) -> bool:
        """Whether a request of that id waits or runs."""
        with self._changed:
            return request_id in self._sinks

    def report(self) -> str:
        """What was done so far; see LLM.report."""
        return self._llm.report()

    def snapshot(self) -> EngineSnapshot:
        """The numbers of the moment, without waiting for the step that runs."""
        return take_snapshot(self._llm)

    def check_grammar(self, params: SamplingParams) -> None:
        """Raise RequestError where the form that params ask for is no grammar; may wait for it."""
        if params.structured_outputs is not None:
            self._table.check_grammar(params.structured_outputs.source)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> "Future[RequestOutput]":
        """Queue a prompt now and return its result to come; cancelling it aborts the request.

        prompt: a text, or a list of token ids. request_id: None makes one. priority: lower goes
        first among those that wait. Raises RequestError, for a request id in use too. A grammar
        that does not compile is not known yet: its request ends with finish reason "error".
        """
        stream = self._build(prompt, params, request_id, priority)
        future: Future[RequestOutput] = Future()
        sink = FutureSink(future)
        self._open(stream, sink)

        def withdraw(done: "Future[RequestOutput]") -> None:
            if done.cancelled():
                self._withdraw(stream.request_id, sink)

        future.add_done_callback(withdraw)
        return future

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """Decode a prompt to its end; arguments and errors as for submit."""
        future = self.submit(prompt, params, request_id=request_id, priority=priority)
        return await asyncio.wrap_future(future)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[StreamOutput, None]:
        """Decode a prompt and give its text as it comes.

        Arguments and errors as for submit; errors are raised here. The request is queued when the
        first piece is asked for, where only its request id can still be refused. A reader that is
        slow gets the pieces joined. Closing the iterator, or cancelling the task that reads it,
        aborts the request.
        """
        stream = self._build(prompt, params, request_id, priority)
        with self._changed:
            self._check_name(stream)
        return self._pieces(stream)

    def abort(self, request_id: str) -> bool:
        """End a request after the step that runs; its reader gets finish reason "abort".

        False when no open request has that id.
        """
        with self._changed:
            self._check_open()
            if request_id not in self._sinks:
                return False
            self._command(lambda: self._run_abort(request_id))
            return True

    def trace(self, trace: StepTrace) -> None:
        """Have a trace run over the steps to come, until it is done or end_trace(); one at once."""
        with self._changed:
            self._check_open()
            self._command(lambda: self._traces.begin(trace, self._llm))

    def end_trace(self, trace: StepTrace) -> None:
        """End a trace after the step that runs; nothing if it has ended."""
        with self._changed:
            self._command(lambda: self._traces.end(trace))

    def close(self) -> None:
        """End what is open with finish reason "abort", join the thread and close the LLM.

        Waits for the step that runs. May be called again.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    async def aclose(self) -> None:
        """close() that does not hold up the event loop."""
        await asyncio.to_thread(self.close)

    async def _pieces(self, stream: OutputStream) -> AsyncGenerator[StreamOutput, None]:
        mailbox = Mailbox(asyncio.get_running_loop(), self._wakes)
        self._open(stream, mailbox)
        try:
            is_last = False
            while not is_last:
                piece = await mailbox.get()
                is_last = piece.output is not None
                yield piece
        finally:
            self._withdraw(stream.request_id, mailbox)

    def _build(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, priority: int
    ) -> OutputStream:
        self._check_open()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {params!r}")
        while True:
            stream = self._table.build(
                prompt, params, request_id=request_id, priority=priority, check_grammar=False
            )
            # A name made here may be one that a caller chose before.
            if request_id is not None or stream.request_id not in self._sinks:
                return stream

    def _open(self, stream: OutputStream, sink: Sink) -> None:
        with self._changed:
            self._check_open()
            self._check_name(stream)
            self._sinks[stream.request_id] = sink
            self._command(lambda: self._table.open([stream]))

    def _check_open(self) -> None:
        if self._error is not None:
            # With the traceback of the failure, which would otherwise grow with every call.
            raise self._error.with_traceback(self._traceback)
        if self._is_closing:
            raise RuntimeError(_CLOSED)

    def _check_name(self, stream: OutputStream) -> None:
        if stream.request_id in self._sinks:
            raise RequestError(f"request id {stream.request_id!r} is in use")

    def _withdraw(self, request_id: str, sink: Sink) -> None:
        """Abort the request of a reader that has gone; nothing if it has ended."""
        with self._changed:
            if self._sinks.get(request_id) is sink:
                self._command(lambda: self._run_abort(request_id))

    def _command(self, command: Callable[[], None]) -> None:
        """Have the engine's thread do something between two steps; called with the lock."""
        self._commands.append(command)
        self._changed.notify()

    def _serve(self) -> None:
        """The engine's thread."""
        try:
            while self._take_commands():
                for stream in self._traces.step(self._table):
                    self._deliver(stream)
                self._wakes.send()
            for request_id in self._table.open_ids:
                self._run_abort(request_id)
            self._wakes.send()
        except BaseException as error:  # whatever it is, nobody may wait for ever
            _LOG.exception("the engine failed; %d requests end with it", len(self._sinks))
            self._fail(error)
        finally:
            self._busy_since = None
            self._close_llm()

    def _take_commands(self) -> bool:
        """Do what was asked for; wait where there is nothing to do. False at the end."""
        with self._changed:
            while not (self._commands or self._is_closing or self._table.has_unfinished):
                self._busy_since = None
                self._changed.wait()
            self._busy_since = monotonic()
            commands, self._commands = self._commands, deque()
            is_closing = self._is_closing
        for command in commands:
            command()
        self._wakes.send()
        return not is_closing

    def _run_abort(self, request_id: str) -> None:
        stream = self._table.abort(request_id)
        if stream is not None:
            self._deliver(stream)

    def _deliver(self, stream: OutputStream) -> None:
        """Put the new pieces of a stream where its reader finds them."""
        with self._changed:
            sink = self._sinks[stream.request_id]
            if stream.is_finished:
                del self._sinks[stream.request_id]
        is_taken = True
        while (piece := stream.take()) is not None:
            is_taken = sink.put(piece)
        if stream.is_finished:
            self._table.discard([stream])
        elif not is_taken:
            self._run_abort(stream.request_id)

    def _fail(self, error: BaseException) -> None:
        # Lines are kept; what the frames held, the engine's memory among it, is let go.
        traceback.clear_frames(error.__traceback__)
        with self._changed:
            self._error, self._traceback = error, error.__traceback__
            sinks = list(self._sinks.values())
            self._sinks.clear()
            self._commands.clear()
        for sink in sinks:
            sink.fail(error)
        self._wakes.send()

    def _close_llm(self) -> None:
        self._traces.close(self._error or RuntimeError(_CLOSED))
        try:
            self._llm.close()
        except Exception:  # a device that failed may fail again when it is told to stop
            _LOG.exception("the engine did not close cleanly")
