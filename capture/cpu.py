"""Capture and replay on the CPU: a flat list of compiled regions bound to static buffers.

Owns the replay loop. Does not own compilation (`decodegrid.capture.compile`) or the rules of
recording (`decodegrid.capture.program`). Data flow: a step runs once under a recorder; the
recorded calls become a `CpuGraph`; each replay makes the same calls with the same tensors and
nothing in between.
"""

from collections.abc import Hashable, Sequence
from contextlib import suppress

import torch

from decodegrid.capture.backend import Step
from decodegrid.capture.compile import RegionCompiler
from decodegrid.capture.program import ProgramNode, ProgramRecorder
from decodegrid.capture.region import NotStoredError


class CpuGraph:
    """A captured step on the CPU."""

    __slots__ = ("_calls", "key", "nodes")

    def __init__(self, key: Hashable, nodes: Sequence[ProgramNode]) -> None:
        self.key = key
        self.nodes = tuple(nodes)
        """What a replay calls, in order."""
        self._calls = tuple((node.function, node.args) for node in nodes)

    @property
    def num_nodes(self) -> int:
        """Regions and opaque calls in the program."""
        return len(self.nodes)

    def replay(self) -> None:
        """Run the program on what its static buffers hold now."""
        with torch.no_grad():
            # Compiled code empties the list it is given to free its arguments early, so each call
            # gets a copy.
            for function, args in self._calls:
                function(args[:])


class CpuBackend:
    """Captures steps that call the regions and opaque calls of one compiler."""

    __slots__ = ("_compiler",)

    def __init__(self, compiler: RegionCompiler) -> None:
        self._compiler = compiler

    def capture(self, key: Hashable, step: Step) -> CpuGraph:
        """Run the step once under a recorder and keep the calls that it made.

        Regions that were not called before are compiled on the way. The state that the step writes
        is really written, except where all regions are stored: then nothing is computed.

        Raises:
            StrayOpError: a tensor operation other than a view ran outside of a region; names it.
            ValueError: the step made no call at all.
        """
        if self._compiler.is_stored:
            # A call that only has to be bound to a region's code need not be made.
            with suppress(NotStoredError):
                return self._record(key, step, bind_only=True)
        return self._record(key, step, bind_only=False)

    def _record(self, key: Hashable, step: Step, *, bind_only: bool) -> CpuGraph:
        recorder = ProgramRecorder()
        with torch.no_grad(), self._compiler.recording(recorder, bind_only=bind_only):
            step()
        if not recorder.program:
            raise ValueError(f"the step for {key} called no region of this compiler")
        return CpuGraph(key, recorder.program)
