"""Emitted tokens a second of whole requests, with a drafter and without.

Owns the workloads (which prompts, how many at once, which seeds) and the division. The rate is
emitted tokens over the time of the call without its prefill steps: scheduling and turning ids into
text count, the prompt does not, because both deployments compute it alike. The rate with prefill is
kept beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from benchmarks.timing import interleave
from decodegrid.engine.llm import LLM
from decodegrid.engine.request_output import RequestOutput
from decodegrid.engine.sampling_params import SamplingParams

TEMPERATURE = 0.7
FIRST_SEED = 1000


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that are decoded `batch` at a time, each to its end or `max_tokens`."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    batch: int
    max_tokens: int
    temperature: float = TEMPERATURE
    first_seed: int = FIRST_SEED


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over a workload."""

    num_emitted: int
    seconds: float
    prefill_seconds: float
    verified: tuple[int, ...]
    """Drafts verified, by draft position."""
    accepted: tuple[int, ...]
    """Drafts accepted, by draft position."""
    num_rounds: int
    """Decode steps summed over requests."""
    token_ids: tuple[tuple[int, ...], ...]

    @property
    def rate(self) -> float:
        """Emitted tokens a second outside prefill."""
        return self.num_emitted / (self.seconds - self.prefill_seconds)

    @property
    def rate_with_prefill(self) -> float:
        """Emitted tokens a second over the whole call."""
        return self.num_emitted / self.seconds


def run_workload(llm: LLM, workload: Workload) -> Run:
    """Decode every prompt once."""
    stats = llm.stats
    before = (stats.num_emitted, stats.prefill_seconds, stats.num_decode_rows)
    verified, accepted = stats.verified_per_position, stats.accepted_per_position
    outputs: list[RequestOutput] = []
    began = perf_counter()
    for start in range(0, len(workload.prompts), workload.batch):
        part = workload.prompts[start : start + workload.batch]
        params = [
            SamplingParams(
                temperature=workload.temperature,
                max_tokens=workload.max_tokens,
                seed=workload.first_seed + start + index,
            )
            for index in range(len(part))
        ]
        outputs += llm.generate(part, params)
    seconds = perf_counter() - began
    return Run(
        num_emitted=stats.num_emitted - before[0],
        seconds=seconds,
        prefill_seconds=stats.prefill_seconds - before[1],
        verified=_difference(stats.verified_per_position, verified),
        accepted=_difference(stats.accepted_per_position, accepted),
        num_rounds=stats.num_decode_rows - before[2],
        token_ids=tuple(output.outputs[0].token_ids for output in outputs),
    )


def compare_llms(llms: dict[str, LLM], workload: Workload, repeats: int) -> dict[str, list[Run]]:
    """Passes of several LLMs over one workload, after one that is not counted.

    They take turns after every batch of prompts, not after every pass: the machine's speed changes
    within seconds, which is less than a pass takes.
    """
    batches = split_workload(workload)
    runs: dict[str, list[Run]] = {name: [] for name in llms}
    for _ in range(repeats + 1):
        parts: dict[str, list[Run]] = {name: [] for name in llms}

        def sample(name: str, batch: Workload, found: dict[str, list[Run]] = parts) -> float:
            found[name].append(run_workload(llms[name], batch))
            return found[name][-1].seconds

        for number, batch in enumerate(batches):
            names = list(llms) if number % 2 == 0 else list(reversed(llms))
            interleave({name: partial(sample, name, batch) for name in names}, 1)
        for name, found in parts.items():
            runs[name].append(join_runs(found))
    return {name: found[1:] for name, found in runs.items()}


def split_workload(workload: Workload) -> list[Workload]:
    """A workload for each batch of its prompts, with the seeds that they have in the whole one."""
    return [
        replace(
            workload,
            prompts=workload.prompts[start : start + workload.batch],
            first_seed=workload.first_seed + start,
        )
        for start in range(0, len(workload.prompts), workload.batch)
    ]


def join_runs(parts: Sequence[Run]) -> Run:
    """The pass that several runs are parts of."""
    return Run(
        num_emitted=sum(run.num_emitted for run in parts),
        seconds=sum(run.seconds for run in parts),
        prefill_seconds=sum(run.prefill_seconds for run in parts),
        verified=tuple(map(sum, zip(*(run.verified for run in parts), strict=True))),
        accepted=tuple(map(sum, zip(*(run.accepted for run in parts), strict=True))),
        num_rounds=sum(run.num_rounds for run in parts),
        token_ids=tuple(ids for run in parts for ids in run.token_ids),
    )


def acceptance(run: Run) -> list[float]:
    """Share of the verified drafts that were accepted, by position; 0 where none was verified."""
    return [a / v if v else 0.0 for a, v in zip(run.accepted, run.verified, strict=True)]


def same_output_share(left: Run, right: Run) -> float:
    """Share of the requests whose tokens are the same in both runs."""
    same = sum(a == b for a, b in zip(left.token_ids, right.token_ids, strict=True))
    return same / len(left.token_ids)


def _difference(after: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(after, before, strict=True))
