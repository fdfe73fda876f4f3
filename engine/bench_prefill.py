"""Prefill: tokens a chunk against its latency, and prompts of several lengths one at a time.

Owns the passes and their figures. A request asks for one token, so that its time to the first token
is its prompt's chunks and one decode step; all tokens of a prompt but the last are prefilled, that
one is decoded. Data flow: prompts of each context -> `run_pass` -> `PrefillLine` and `ChunkLine` ->
tables and JSON.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from decodegrid.capture.bench_numbers import Percentiles, RepeatSpread, percentiles, repeat_spread
from decodegrid.capture.bench_table import format_table
from decodegrid.engine.bench_drive import ClosedLoop, PassRequest, run_pass
from decodegrid.engine.bench_report import counted
from decodegrid.engine.bench_stats import BenchPass
from decodegrid.engine.bench_sweep import Prompts
from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.verify_policy import FixedVerify


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Prompts by context, then by repeat, those that warm up first."""

    contexts: tuple[int, ...]
    """Tokens of each prompt, 2 or more."""
    prompts: tuple[tuple[Prompts, ...], ...]
    warm_up: int
    repeats: int


@dataclass(frozen=True, slots=True)
class PrefillLine:
    """All prompts of a context."""

    context_len: int
    num_prompts: int
    tokens_per_s: RepeatSpread
    """Prefilled tokens over the time of the chunks."""
    prefill_ms: Percentiles
    """All chunks of a prompt together."""
    first_token_ms: Percentiles
    """From the asking to the first token: chunks, host and one decode step."""


@dataclass(frozen=True, slots=True)
class ChunkLine:
    """All chunks that ran in the captured graph of one size."""

    captured_size: int
    num_chunks: int
    tokens_per_chunk: float
    """Mean of the tokens that were in it; the rest of the size was padding."""
    ms: Percentiles
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What came of it."""

    lines: tuple[PrefillLine, ...]
    chunks: tuple[ChunkLine, ...]
    num_uncounted: int


def run_prefill(llm: LLM, plan: PrefillPlan, tell: Callable[[str], None]) -> PrefillResult:
    """Compute every prompt, one at a time; `tell` gets a line for each pass.

    The LLM's prefix cache is off from then on. Raises RequestError for a prompt that does not fit.
    """
    llm.scheduler.prefix = None
    lines: list[PrefillLine] = []
    counted: list[BenchPass] = []
    for context_len, repeats in zip(plan.contexts, plan.prompts, strict=True):
        passes = []
        for repeat, prompts in enumerate(repeats):
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            requests = [PassRequest(prompt, params) for prompt in prompts]
            found = run_pass(llm, requests, FixedVerify(1), ClosedLoop(1))
            passes.append(found)
            is_counted = repeat >= plan.warm_up
            word = f"repeat {repeat - plan.warm_up + 1}/{plan.repeats}" if is_counted else "warm-up"
            rate = _tokens_per_s(found)
            tell(f"{word}: context {context_len}: {rate:.4g} prompt tokens/s")
        kept = passes[plan.warm_up :]
        counted += kept
        lines.append(_prefill_line(context_len, kept))
    return PrefillResult(
        tuple(lines), tuple(_chunk_lines(counted)), plan.warm_up * len(plan.contexts)
    )


def prompt_table(result: PrefillResult) -> str:
    """A line for each context."""
    head = [
        "context", "prompts", "tokens/s", "prefill ms P50 / P90 / P99",
        "first token ms P50 / P90 / P99",
    ]  # fmt: skip
    rows = [
        [
            str(line.context_len), str(line.num_prompts), str(line.tokens_per_s),
            str(line.prefill_ms), str(line.first_token_ms),
        ]
        for line in result.lines
    ]  # fmt: skip
    return format_table(head, rows)


def chunk_table(result: PrefillResult) -> str:
    """A line for each captured size: tokens a chunk against latency."""
    head = ["captured size", "chunks", "tokens in it", "ms P50 / P90 / P99", "tokens/s"]
    rows = [
        [
            str(line.captured_size), str(line.num_chunks), f"{line.tokens_per_chunk:.1f}",
            str(line.ms), f"{line.tokens_per_s:.4g}",
        ]
        for line in result.chunks
    ]  # fmt: skip
    return format_table(head, rows)


def method_lines(result: PrefillResult, plan: PrefillPlan) -> list[str]:
    """How it was measured."""
    return [
        "denominator: 1 device (all threads of the engine), one prompt at a time, nothing decoding "
        "beside it",
        "tokens/s: prefilled tokens (all of a prompt but the last, which is decoded) over the time "
        "of their chunks by the host's clock; first token: chunks, host work and one decode step",
        "percentiles: linear between samples, over the samples of "
        f"{counted(plan.repeats, 'repeat')}, which have other prompts each; a (b..c): median and "
        "least..greatest over the repeats",
        f"not counted: {counted(result.num_uncounted, 'pass')} that warmed up; nothing else is "
        "left out",
        "prefix cache: off, so that every prompt is computed whole",
    ]


def prefill_document(result: PrefillResult) -> dict[str, Any]:
    """The figures as JSON values."""
    return {
        "prompts": [
            {
                "context_len": line.context_len,
                "prompts": line.num_prompts,
                "tokens_per_s": line.tokens_per_s.as_json(),
                "prefill_ms": line.prefill_ms.as_json(),
                "first_token_ms": line.first_token_ms.as_json(),
            }
            for line in result.lines
        ],
        "chunks": [
            {
                "captured_size": line.captured_size,
                "chunks": line.num_chunks,
                "tokens_per_chunk": line.tokens_per_chunk,
                "ms": line.ms.as_json(),
                "tokens_per_s": line.tokens_per_s,
            }
            for line in result.chunks
        ],
    }


def _tokens_per_s(found: BenchPass) -> float:
    return found.stats.num_prefill_tokens / found.stats.prefill_seconds


def _prefill_line(context_len: int, passes: Sequence[BenchPass]) -> PrefillLine:
    records = [record for each in passes for record in each.requests]
    # One prompt at a time, so that its chunks are the next ones.
    prompt_ms = []
    for each in passes:
        num_chunks = len(each.stats.chunks) // len(each.requests)
        times = [1e3 * chunk.seconds for chunk in each.stats.chunks]
        prompt_ms += [
            sum(times[start : start + num_chunks]) for start in range(0, len(times), num_chunks)
        ]
    rate = repeat_spread(map(_tokens_per_s, passes))
    prefill = percentiles(prompt_ms)
    first = percentiles([1e3 * record.first_token_s for record in records])
    assert rate is not None and prefill is not None and first is not None
    return PrefillLine(context_len, len(records), rate, prefill, first)


def _chunk_lines(passes: Sequence[BenchPass]) -> list[ChunkLine]:
    chunks = [chunk for each in passes for chunk in each.stats.chunks]
    lines = []
    for size in sorted({chunk.captured_size for chunk in chunks}):
        own = [chunk for chunk in chunks if chunk.captured_size == size]
        tokens = sum(chunk.num_tokens for chunk in own)
        seconds = sum(chunk.seconds for chunk in own)
        ms = percentiles([1e3 * chunk.seconds for chunk in own])
        assert ms is not None
        lines.append(ChunkLine(size, len(own), tokens / len(own), ms, tokens / seconds))
    return lines
