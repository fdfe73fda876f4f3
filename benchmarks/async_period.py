"""Overlapping steps: `python -m benchmarks.async_period [--json FILE] [--repeats N]`.

Measures the period of a decode step with a full batch, with a step in flight and without, and what
of it is the captured graph; then the rate of the same requests as a whole, their ends found late
included. Owns the two engines around one runner and the division. The period is the time from one
call of the stream table to the next, which takes in scheduling, committing and turning ids into
text. Both ratios are taken inside a run, so that another load of the machine hits both sides alike;
the two engines take turns, and every line gives min / median / max over the repeats.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.deployments import ALONE, Deployment, start
from benchmarks.machine import describe_machine
from benchmarks.prompts import STORIES, STRUCTURED, encode_prompts
from benchmarks.results import format_rows, save_json
from benchmarks.timing import Spread, interleave, paired_ratio, spread
from decodegrid.configs.load import load_config
from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.surface_run import make_policy
from decodegrid.engine.tokenizer import Tokenizer

BATCH = 8
GOAL = 1.15
"""Most that a period may be over its graph with a step in flight."""
FIRST_SEED = 1000


@dataclass(frozen=True, slots=True)
class Period:
    """One pass over the batch."""

    period_s: float
    """Mean over the steps with all rows."""
    graph_s: float
    num_steps: int
    """Steps that the means are over."""
    tokens_per_s: float
    """Of the whole requests, prompts included."""
    first_token_s: float
    """Mean time to the first token, all requests having come at once."""
    late_share: float
    """Share of the query tokens that went to rows whose request had ended."""
    token_ids: tuple[tuple[int, ...], ...]


def make_llms(deployment: Deployment) -> dict[str, LLM]:
    """An engine with a step in flight and one without, around one runner."""
    tokenizer = Tokenizer(deployment.loaded.checkpoint_dir / "tokenizer.json")
    return {
        name: LLM.from_runner(
            deployment.runner,
            tokenizer,
            decode_steps_per_prefill_chunk=0,  # prompts first, so that all rows decode together
            policy=make_policy(deployment.runner, deployment.loaded),
            async_scheduling=name == "on",
        )
        for name in ("on", "off")
    }


def run_batch(llm: LLM, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Period:
    """Decode the prompts at once and time the calls in which all of them decode."""
    table, stats = llm.stream_table, llm.stats
    tokens_before, late_before = stats.num_query_tokens, stats.num_late_query_tokens
    streams = []
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=0.7, seed=FIRST_SEED + index, max_tokens=max_tokens, ignore_eos=True
        )
        streams.append(table.build(prompt, params, index=index))
    first: dict[int, float] = {}
    seconds = graph = 0.0
    count = 0
    began = perf_counter()
    table.open(streams)
    before = began
    while not all(stream.is_finished for stream in streams):
        full = len(llm.scheduler.running) == len(prompts)
        graph_before, steps_before = stats.graph_seconds, stats.num_decode_steps
        for stream in table.step():
            first.setdefault(stream.index, perf_counter() - began)
        now = perf_counter()
        full = full and len(llm.scheduler.running) == len(prompts)
        if full and stats.num_decode_steps > steps_before:
            seconds += now - before
            graph += stats.graph_seconds - graph_before
            count += 1
        before = now
    total = perf_counter() - began
    outputs = [stream.output() for stream in streams]
    table.discard(streams)
    if not count:
        raise ValueError(f"no step had all {len(prompts)} rows; max_tokens is {max_tokens}")
    ids = tuple(output.outputs[0].token_ids for output in outputs)
    num_tokens = stats.num_query_tokens - tokens_before
    return Period(
        period_s=seconds / count,
        graph_s=graph / count,
        num_steps=count,
        tokens_per_s=sum(map(len, ids)) / total,
        first_token_s=sum(first.values()) / len(first),
        late_share=(stats.num_late_query_tokens - late_before) / num_tokens,
        token_ids=ids,
    )


def measure(path: Path | None, repeats: int, max_tokens: int) -> dict[str, Any]:
    """Both engines in turns, after a pass of each that is not counted; prints as it goes.

    Raises ValueError for a deployment with fewer than BATCH rows.
    """
    deployment = start(load_config(path, ALONE))
    if deployment.runner.max_num_reqs < BATCH:
        raise ValueError(
            f"scheduler.max_num_reqs is {deployment.runner.max_num_reqs}; needs {BATCH}"
        )
    tokenizer = deployment.loaded.checkpoint_dir / "tokenizer.json"
    pairs = zip(
        encode_prompts(STRUCTURED, tokenizer), encode_prompts(STORIES, tokenizer), strict=True
    )
    mixed = [prompt for pair in pairs for prompt in pair]
    prompts = [mixed[index % len(mixed)] for index in range(BATCH)]
    llms = make_llms(deployment)
    runs: dict[str, list[Period]] = {name: [] for name in llms}

    def sampler(name: str) -> Callable[[], float]:
        def sample() -> float:
            runs[name].append(run_batch(llms[name], prompts, max_tokens))
            return runs[name][-1].period_s

        return sample

    interleave({name: sampler(name) for name in llms}, repeats + 1)
    runs = {name: found[1:] for name, found in runs.items()}
    return {
        **describe_machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "batch": BATCH,
        "repeats": repeats,
        "goal": GOAL,
        **_summary(runs),
        "compilations_after_ready": deployment.runner.counters.compilations_after_ready,
    }


def _summary(runs: dict[str, list[Period]]) -> dict[str, Any]:
    rows: list[tuple[str, Spread, str]] = []
    found: dict[str, Any] = {}
    for name, periods in runs.items():
        values = {
            "period_ms": spread([run.period_s * 1e3 for run in periods]),
            "graph_ms": spread([run.graph_s * 1e3 for run in periods]),
            "period_over_graph": paired_ratio(
                [run.period_s for run in periods], [run.graph_s for run in periods]
            ),
            "tokens_per_s": spread([run.tokens_per_s for run in periods]),
            "first_token_ms": spread([run.first_token_s * 1e3 for run in periods]),
            "late_share": spread([run.late_share for run in periods]),
        }
        units = ("ms", "ms", "x", "tokens/s", "ms", "of the query tokens")
        rows += [
            (f"{name}: {key.replace('_', ' ')}", value, unit)
            for (key, value), unit in zip(values.items(), units, strict=True)
        ]
        found[name] = {key: value.as_json() for key, value in values.items()}
    pairs = list(zip(runs["on"], runs["off"], strict=True))
    # Totals follow the measured times, and sums in float32 the total: near ties may fall apart.
    same = sum(
        left == right
        for on, off in pairs
        for left, right in zip(on.token_ids, off.token_ids, strict=True)
    )
    found["same_output_share"] = same / (BATCH * len(pairs))
    faster = paired_ratio(
        [run.tokens_per_s for run in runs["on"]], [run.tokens_per_s for run in runs["off"]]
    )
    found["on_over_off_tokens_per_s"] = faster.as_json()
    print(f"\n{BATCH} requests, a step in flight (on) and none (off): min / median / max")
    print(format_rows([*rows, ("on over off: tokens per s", faster, "x")]))
    print(f"  requests with the same tokens in both: {found['same_output_share']:.1%}")
    ratio = found["on"]["period_over_graph"]["median"]
    print(f"  goal for period over graph, on: {GOAL}; {'met' if ratio <= GOAL else 'MISSED'}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 2 for arguments or a file that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_period", allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--repeats", type=int, default=9, metavar="N")
    parser.add_argument("--config", type=Path, metavar="FILE", help="deployment; default tiny.yaml")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    args = parser.parse_args(argv)
    for name in ("repeats", "max_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    try:
        result = measure(args.config, args.repeats, args.max_tokens)
        save_json(result, args.json)
    except (ValueError, OSError) as error:
        print(f"benchmarks.async_period: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
