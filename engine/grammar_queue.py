"""Requests whose grammar is still being compiled.

Owns the wait between the arrival of such a request and its place in the scheduler's queue. Compiles
nothing itself. Used by the engine's thread; it never waits for a grammar while it has other work.
"""

from collections import Counter
from dataclasses import dataclass
from time import monotonic

from decodegrid.engine.grammar_compiler import GrammarCompiler, GrammarJob
from decodegrid.engine.request import Request


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    job: GrammarJob
    deadline: float


class GrammarQueue:
    """See the module; requests leave it in the order in which their grammars are ready."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._waiting: dict[str, _Waiting] = {}
        self._num_waiting: Counter[GrammarJob] = Counter()
        """Requests of each job."""

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, request: Request) -> None:
        """Have a request's grammar compiled, or found among those that are."""
        assert request.grammar is not None and not request.grammar.has_begun
        job = self._compiler.submit(request.grammar.source)
        deadline = monotonic() + self._compiler.timeout_s
        self._waiting[request.request_id] = _Waiting(request, job, deadline)
        self._num_waiting[job] += 1

    def remove(self, request_id: str) -> Request | None:
        """Take a request out; None when it does not wait here."""
        return self._leave(request_id).request if request_id in self._waiting else None

    def take(self) -> list[Request]:
        """Requests whose wait is over: with a grammar, or failed."""
        done = [waiting for waiting in self._waiting.values() if self._settle(waiting)]
        return [self._leave(waiting.request.request_id).request for waiting in done]

    def wait(self, seconds: float) -> None:
        """Wait until a grammar is ready, at most so long."""
        self._compiler.wait(seconds)

    def _leave(self, request_id: str) -> _Waiting:
        """Take a request out, and with the last one that waited its job, if it has not begun."""
        waiting = self._waiting.pop(request_id)
        self._num_waiting[waiting.job] -= 1
        if not self._num_waiting[waiting.job]:
            del self._num_waiting[waiting.job]
            self._compiler.withdraw(waiting.job)
        return waiting

    def _settle(self, waiting: _Waiting) -> bool:
        request, job = waiting.request, waiting.job
        grammar = request.grammar
        assert grammar is not None
        if job.error is not None:
            request.fail(f"the grammar does not compile: {job.error}")
        elif job.is_done:
            grammar.begin(
                self._compiler.matcher(job), self._compiler.num_words, request.output_token_ids
            )
            if grammar.failure is None and grammar.allows_nothing():
                request.fail("structured_outputs: no text has this form, not even an empty one")
            elif grammar.failure is not None:
                request.fail(grammar.failure)
        elif monotonic() >= waiting.deadline:
            request.fail(
                f"the grammar was not compiled after {self._compiler.timeout_s:g} s "
                "(structured_outputs.compile_timeout_s)"
            )
        else:
            return False
        return True
