"""Host time of a decode step: scheduler, loop and runner, with nothing behind the replay.

Owns a runner whose captured graphs compute nothing. Everything on the host is the real code, the
writing of slots and the reading of results included; every row emits the same tokens, so nothing is
subtracted from anything.
"""

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from decodegrid.capture.grid import GraphKey
from decodegrid.engine.admission import EngineLimits, build_request
from decodegrid.engine.engine_loop import EngineLoop
from decodegrid.engine.runner import Runner
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.scheduler import Scheduler
from decodegrid.engine.stats import EngineStats
from decodegrid.engine.step_graphs import PrefillKey, StepGraphs
from decodegrid.graphs.step_buffers import StepBuffers

PROMPT_LEN = 64
EMITTED_PER_STEP = 3
TOKEN_ID = 20
"""Neither the end of text nor any other special token of a DeepSeek vocabulary."""


@dataclass(frozen=True, slots=True)
class EmptyGraph:
    """A captured graph that runs nothing."""

    key: GraphKey | PrefillKey
    num_nodes: int = 0

    def replay(self) -> None:
        """Return at once."""


class AnswerGraph:
    """A decode graph that only writes how many tokens each row emits.

    Rows that all have their drafts verified emit EMITTED_PER_STEP; in any other step, of which the
    first of a text is one, each emits 1.
    """

    num_nodes = 0

    def __init__(self, key: GraphKey, buffers: StepBuffers, num_draft_tokens: int) -> None:
        self.key = key
        self._most = num_draft_tokens + 1
        self._total, self._slots = buffers.total.numpy(), buffers.rows.slots.numpy()
        self._num_emitted = buffers.rows.num_emitted.numpy()
        self._query_lens = buffers.rows.query_lens.numpy()

    def replay(self) -> None:
        """About 2 us of the host's time, which a real graph spends too."""
        num_rows = int(np.count_nonzero(self._slots))
        is_full = int(self._total[0]) == num_rows * self._most
        self._num_emitted[:] = min(EMITTED_PER_STEP, self._most) if is_full else 1
        self._query_lens[:] = self._most if is_full else 1


def hollow_runner(runner: Runner) -> Runner:
    """The same runner with empty graphs; overwrites the rows' output buffers. CPU only."""
    runner.buffers.rows.token_ids.fill_(TOKEN_ID)
    drafts = runner.num_draft_tokens
    return Runner(
        runner.model,
        runner.buffers,
        runner.grid,
        StepGraphs(
            {key: AnswerGraph(key, runner.buffers, drafts) for key in runner.grid.keys},
            {size: EmptyGraph(PrefillKey(size)) for size in runner.prefill_chunk_sizes},
        ),
        runner.counters,
    )


def host_seconds(runner: Runner, num_reqs: int, num_steps: int) -> float:
    """Mean seconds of a loop step with `num_reqs` running requests, over about `num_steps` steps.

    The mean, because block tables grow in some steps only. Requests run to their ends; steps with
    a prompt chunk are left out. Raises RequestError when the text does not fit the deployment.
    """
    limits = EngineLimits.of(runner)
    stats = EngineStats(runner)
    loop = EngineLoop(runner, Scheduler(limits), stats)
    emitted = min(EMITTED_PER_STEP, runner.num_draft_tokens + 1)
    most = min(num_steps * emitted, limits.max_model_len - PROMPT_LEN)
    params = SamplingParams(temperature=0.7, max_tokens=most, ignore_eos=True)
    prompt = [TOKEN_ID] * PROMPT_LEN
    for index in range(num_reqs):
        loop.add(
            build_request(
                str(index), prompt, params, seed=index, eos_token_id=TOKEN_ID, limits=limits
            )
        )
    times = []
    while loop.has_unfinished:
        full = len(loop.scheduler.running) == num_reqs
        began = perf_counter()
        loop.step()
        if full:
            times.append(perf_counter() - began)
    return sum(times) / len(times)
