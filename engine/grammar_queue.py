"""Requests whose grammar is still being compiled.

Owns the wait between the arrival of such a request and its place in the scheduler's queue. Compiles
nothing itself. Used by the engine's thread; it never waits for a grammar while it has other work.
"""

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

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, request: Request) -> None:
        """Have a request's grammar compiled, or found among those that are."""
        assert request.grammar is not None and not request.grammar.has_begun
        job = self._compiler.submit(request.grammar.source)
        deadline = monotonic() + self._compiler.timeout_s
        self._waiting[request.request_id] = _Waiting(request, job, deadline)

    def remove(self, request_id: str) -> Request | None:
        """Take a request out; None when it does not wait here."""
        waiting = self._waiting.pop(request_id, None)
        return None if waiting is None else waiting.request

    def take(self) -> list[Request]:
        """Requests whose wait is over: with a grammar, or failed."""
        done = [waiting for waiting in self._waiting.values() if self._settle(waiting)]
        for waiting in done:
            del self._waiting[waiting.request.request_id]
        return [waiting.request for waiting in done]

    def wait(self, seconds: float) -> None:
        """Wait until a grammar is ready, at most so long."""
        self._compiler.wait(seconds)

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
