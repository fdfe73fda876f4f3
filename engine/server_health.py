"""Whether the server serves, and why not.

Owns the phases from start-up to end and the words of /ready. Does not end the process. Data flow:
the process tells the phase, the engine how long its step runs, and a reason comes out.
"""

import logging
from enum import Enum

from decodegrid.engine.async_llm import AsyncLLM
from decodegrid.engine.server_errors import unavailable

_LOG = logging.getLogger("decodegrid.server")


class Phase(Enum):
    """Where the process stands."""

    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Health:
    """The one place that knows the phase."""

    def __init__(self, stall_s: float) -> None:
        """stall_s: seconds of one step after which the engine counts as hanging."""
        self._stall_s = stall_s
        self._engine: AsyncLLM | None = None
        self._failure = ""
        self.phase = Phase.WARMING

    @property
    def engine(self) -> AsyncLLM | None:
        """None while it is made."""
        return self._engine

    def ready(self, engine: AsyncLLM) -> None:
        """The engine is there."""
        self._engine, self.phase = engine, Phase.READY

    def drain(self) -> None:
        """Nothing new is taken any more."""
        if self.phase is not Phase.FAILED:
            self.phase = Phase.DRAINING

    def fail(self, why: str) -> None:
        """The engine serves nobody any more."""
        _LOG.error("the server ends: %s", why)
        self.phase, self._failure = Phase.FAILED, why

    def problem(self) -> str | None:
        """Why the server is not ready; None when it is."""
        if self.phase is Phase.WARMING or self._engine is None:
            return "warming: the engine is loaded, compiled and captured"
        if self.phase is Phase.FAILED:
            return f"failed: {self._failure}"
        if self._engine.error is not None:
            return f"failed: {describe(self._engine.error)}"
        if self.phase is Phase.DRAINING:
            return "draining: open requests are ended, new ones are not taken"
        busy_s = self._engine.busy_s
        if busy_s >= self._stall_s:
            return f"stalled: no step has finished for {busy_s:.1f} s"
        return None

    def require(self) -> AsyncLLM:
        """The engine; raises ApiError where it takes no requests.

        A stalled engine still takes them: whether it goes on is not known.
        """
        if self.phase is not Phase.READY or self._engine is None or self._engine.error is not None:
            raise unavailable(f"the server takes no requests: {self.problem()}")
        return self._engine


def describe(error: BaseException) -> str:
    """An error on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
