"""A chrome trace of some steps of a live engine, with the regions of each graph by name.

Owns which steps are traced and the names in the trace. Data flow: ready runner -> a second runner
over the same state and graphs, whose replays say what they run -> torch.profiler -> file. On the
CPU every region of a step is a range of its own; a CUDA graph is one range, and an NVTX range for
other profilers, with its kernels under it.
"""

import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from decodegrid.capture.backend import CapturedGraph, CutGraph
from decodegrid.capture.cpu import CpuGraph
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.llm import LLM
from decodegrid.engine.profile_live import built_in_prompts, live_llm, live_params
from decodegrid.engine.runner import Runner
from decodegrid.engine.step_graphs import StepGraphs
from decodegrid.engine.tokenizer import Tokenizer

MAX_REQUESTS = 32
"""Decoded at once in a trace, at most."""

Annotate = Callable[[str], AbstractContextManager[object]]
"""Opens a range of that name."""

_Key = TypeVar("_Key")


class NamedReplay:
    """A captured graph whose replays say what they run."""

    __slots__ = ("_annotate", "_graph")

    def __init__(self, graph: CapturedGraph, annotate: Annotate) -> None:
        self._graph = graph
        self._annotate = annotate

    @property
    def key(self) -> Hashable:
        """Of the graph."""
        return self._graph.key

    @property
    def num_nodes(self) -> int:
        """Of the graph."""
        return self._graph.num_nodes

    def replay(self) -> None:
        """The graph's work, in ranges: one for the graph, and on the CPU one for each node."""
        with self._annotate(str(self.key)):
            if not isinstance(self._graph, CpuGraph):
                self._graph.replay()
                return
            with torch.no_grad():
                for node in self._graph.nodes:
                    with self._annotate(node.name):
                        node.function(node.args[:])


def named_graphs(graphs: StepGraphs, annotate: Annotate) -> StepGraphs:
    """The same graphs with named replays."""

    def whole(table: Mapping[_Key, CapturedGraph]) -> dict[_Key, CapturedGraph]:
        return {key: NamedReplay(graph, annotate) for key, graph in table.items()}

    return StepGraphs(
        whole(graphs.fused),
        whole(graphs.prefill),
        {
            key: CutGraph(
                cut.key, NamedReplay(cut.first, annotate), NamedReplay(cut.second, annotate)
            )
            for key, cut in graphs.rich.items()
        },
        whole(graphs.prompt_reports),
    )


def named_runner(runner: Runner, annotate: Annotate) -> Runner:
    """A runner over the same state, buffers and graphs; only one of the two may have requests."""
    assert runner.start_up is not None
    graphs = named_graphs(runner.start_up.graphs, annotate)
    named = Runner(
        runner.model,
        runner.buffers,
        runner.grid,
        graphs,
        runner.counters,
        runner.start_up_report,
        runner.facts,
    )
    named.snapshots = runner.snapshots
    return named


def write_trace(
    runner: Runner, loaded: LoadedConfig, tokenizer: Tokenizer, num_steps: int, path: Path
) -> int:
    """Trace that many steps of an engine that decodes many requests at once.

    The prompts are prefilled before. A file name that ends with .gz is compressed. An older file
    is replaced when the trace is whole. Returns the number of steps traced: fewer where every
    request had come to the deployment's limit.

    Raises OSError for the file.
    """
    device = runner.model.state.slots.last_token.device
    named = named_runner(runner, range_maker(device))
    with live_llm(named, loaded, tokenizer, prompts_first=True) as llm, ExitStack() as stack:
        stack.callback(_open_requests(llm, loaded, tokenizer))
        table = llm.stream_table
        while table.has_unfinished and llm.stats.num_decode_steps < 2:
            table.step()
        done = 0
        with profile(activities=trace_activities(device)) as profiler:
            while done < num_steps and table.has_unfinished:
                with record_function(f"step {done + 1}"):
                    table.step()
                done += 1
        export_trace(profiler, path)
    return done


def _open_requests(llm: LLM, loaded: LoadedConfig, tokenizer: Tokenizer) -> Callable[[], None]:
    """Queue as many requests as decode at once; returns what takes them back."""
    prompts = built_in_prompts(tokenizer, min(MAX_REQUESTS, loaded.config.scheduler.max_num_reqs))
    params = live_params(loaded, prompts, to_the_limit=True)
    table = llm.stream_table
    streams = [
        table.build(prompt, each, index=index)
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
    ]
    table.open(streams)
    return lambda: table.discard(streams)


def trace_activities(device: torch.device) -> list[ProfilerActivity]:
    """What a trace of steps on that device records."""
    cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return [ProfilerActivity.CPU, *cuda]


def range_maker(device: torch.device) -> Annotate:
    """What opens a named range in traces of that device."""
    return _nvtx_range if device.type == "cuda" else record_function


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    with record_function(name), torch.cuda.nvtx.range(name):
        yield


def export_trace(profiler: profile, path: Path) -> None:
    """Write a trace beside its place, then put it there; .gz compresses it. Raises OSError."""
    suffix = ".json.gz" if path.name.endswith(".gz") else ".json"
    part = path.parent / f".{path.name}.{uuid4().hex}{suffix}"
    try:
        profiler.export_chrome_trace(str(part))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
