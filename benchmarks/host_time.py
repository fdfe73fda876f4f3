"""Host time of a decode step: scheduler, loop and runner, with nothing behind the replay.

Owns a runner whose captured graphs are empty. Everything on the host is the real code, the writing
of slots and the reading of results included; the output buffers hold a fixed answer in which every
row emits the same tokens, so nothing is subtracted from anything.
"""

from dataclasses import dataclass
from time import perf_counter

from decodegrid.capture.grid import GraphKey
from decodegrid.engine.admission import EngineLimits, build_request
from decodegrid.engine.engine_loop import EngineLoop
from decodegrid.engine.runner import PrefillKey, Runner
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.scheduler import Scheduler
from decodegrid.engine.stats import EngineStats

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


def hollow_runner(runner: Runner) -> Runner:
    """The same runner with empty graphs; overwrites the rows' output buffers."""
    emitted = min(EMITTED_PER_STEP, runner.num_draft_tokens + 1)
    rows = runner.buffers.rows
    rows.token_ids.fill_(TOKEN_ID)
    rows.num_emitted.fill_(emitted)
    rows.query_lens.fill_(runner.num_draft_tokens + 1)
    return Runner(
        runner.model,
        runner.buffers,
        runner.grid,
        {key: EmptyGraph(key) for key in runner.grid.keys},
        {size: EmptyGraph(PrefillKey(size)) for size in runner.prefill_chunk_sizes},
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
