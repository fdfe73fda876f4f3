"""Runs what `decodegrid bench` was asked for: prompts, start-up, passes, tables, files.

Owns the order of these, and refuses prompts before the start-up. Data flow: checked arguments ->
prompts of all repeats -> an LLM -> passes -> text on standard output, JSON and PNG.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decodegrid.capture.bench_plot import plot_pareto
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine import bench_prefill, run_facts
from decodegrid.engine.admission import EngineLimits, build_request
from decodegrid.engine.bench_document import (
    run_document,
    setting_documents,
    workload_document,
    write_document,
)
from decodegrid.engine.bench_prompts import PromptSource, make_prompts
from decodegrid.engine.bench_report import (
    Line,
    assumed_points,
    count_table,
    equality_lines,
    load_table,
    make_lines,
    method_lines,
    pareto_points,
    pareto_table,
    speed_table,
    step_table,
)
from decodegrid.engine.bench_sweep import Prompts, SweepPlan, run_sweep
from decodegrid.engine.llm import LLM
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer

BuildLLM = Callable[[LoadedConfig], LLM]

_ANY_POOL = 2**31
"""Blocks that are enough for every prompt: where start-up sizes the pool, it refuses."""


@dataclass(frozen=True, slots=True)
class BenchRun:
    """What a run needs beside its plan."""

    loaded: LoadedConfig
    build_llm: BuildLLM
    asked: str
    """A phrase for the prompts."""
    tell: Callable[[str], None]
    """Gets a line for each pass."""
    json: Path | None
    png: Path | None = None
    assumed_acceptance: float = 0.0


def prompts_of(
    loaded: LoadedConfig,
    source: PromptSource,
    contexts: Sequence[int | None],
    *,
    num_requests: int,
    num_repeats: int,
    seed: int,
    max_tokens: int,
) -> tuple[tuple[Prompts, ...], ...]:
    """Token ids by context and repeat, each checked as the engine would.

    Raises RequestError for a prompt that does not fit, ValueError or OSError for the checkpoint's
    tokenizer.json.
    """
    if not loaded.checkpoint_dir.is_dir():
        raise ValueError(f"{loaded.checkpoint_dir}: no such checkpoint directory")
    tokenizer = Tokenizer(loaded.checkpoint_dir / "tokenizer.json")
    found = tuple(
        tuple(
            tuple(make_prompts(source, tokenizer, num_requests, seed + repeat, context_len))
            for repeat in range(num_repeats)
        )
        for context_len in contexts
    )
    config = loaded.config
    num_blocks = _ANY_POOL if config.cache.pool_bytes else config.num_blocks
    limits = EngineLimits.of_deployment(config, tokenizer.vocab_size, num_blocks)
    params, eos = SamplingParams(max_tokens=max_tokens), tokenizer.eos_token_id
    for prompt in {prompt for repeats in found for prompts in repeats for prompt in prompts}:
        room = limits.max_model_len - max_tokens
        if len(prompt) > room:
            raise RequestError(
                f"a prompt has {len(prompt)} tokens; with --max-tokens {max_tokens} at most {room} "
                f"fit scheduler.max_model_len = {limits.max_model_len}"
            )
        build_request("unsent", prompt, params, seed=0, eos_token_id=eos, limits=limits)
    return found


def run_decode(run: BenchRun, plan: SweepPlan) -> int:
    """The closed loop."""
    lines, document, num_drafts = _sweep("decode", run, plan, [])
    points = pareto_points(lines)
    assumed = assumed_points(lines, num_drafts, run.assumed_acceptance)
    notes = list(_equality(run, plan, lines))
    if assumed:
        notes.append(
            f"ASSUMED rows: measured steps/s of verifying all drafts, times 1 + {num_drafts} x "
            f"{run.assumed_acceptance:g}; nobody measured them"
        )
    _print(
        {
            "speed": speed_table(lines),
            "steps and waits": step_table(lines),
            "drafts and tokens": count_table(lines),
            "a user against a device": pareto_table(points, assumed),
        },
        [*notes, *document["method"]],
        document,
    )
    document["pareto"] = {
        "measured": [point.as_json() for point in points],
        "assumed_not_measured": [point.as_json() for point in assumed],
    }
    _write(run.json, document)
    if run.png is not None and points:
        plot_pareto(run.png, points, assumed, _caption(document))
        print(f"written: {run.png}")
    return 0


def run_load(run: BenchRun, plan: SweepPlan) -> int:
    """The open loop."""
    arrivals = (
        "arrivals: a Poisson process, the same for all policies of a repeat, the first at 0; in "
        "one process, without a server; waits count from when a request was due"
    )
    lines, document, _ = _sweep("load", run, plan, [arrivals])
    _print(
        {
            "load": load_table(lines),
            "steps and waits": step_table(lines),
            "drafts and tokens": count_table(lines),
        },
        [*_equality(run, plan, lines), *document["method"]],
        document,
    )
    _write(run.json, document)
    return 0


def run_prefill(run: BenchRun, plan: bench_prefill.PrefillPlan) -> int:
    """Prompts alone."""
    with run.build_llm(run.loaded) as llm:
        before = run_facts.load_average()
        result = bench_prefill.run_prefill(llm, plan, run.tell)
        method = [f"prompts: {run.asked}", *bench_prefill.method_lines(result, plan)]
        document = run_document("prefill", run.loaded, llm, before, method)
    tables = {
        "prompts, one at a time": bench_prefill.prompt_table(result),
        "chunks": bench_prefill.chunk_table(result),
    }
    _print(tables, method, document)
    _write(run.json, document | bench_prefill.prefill_document(result))
    return 0


def _sweep(
    kind: str, run: BenchRun, plan: SweepPlan, more_method: list[str]
) -> tuple[list[Line], dict[str, Any], int]:
    """Start, run every pass, close; the lines, the document and the deployment's K."""
    with run.build_llm(run.loaded) as llm:
        before = run_facts.load_average()
        result = run_sweep(llm, plan, run.tell)
        lines = make_lines(result)
        method = [*method_lines(plan, result, run.asked), *more_method]
        document = run_document(kind, run.loaded, llm, before, method)
        num_drafts = llm.limits.num_draft_tokens
    same, compared = sum(line.num_same for line in lines), sum(line.num_compared for line in lines)
    document |= {
        "workload": workload_document(plan, run.asked),
        "settings": setting_documents(lines, plan, result),
        "output_equality": {
            "comparable": _is_comparable(run, plan), "same": same, "compared": compared
        },
    }  # fmt: skip
    return lines, document, num_drafts


def _is_comparable(run: BenchRun, plan: SweepPlan) -> bool:
    """Whether what is emitted does not depend on what is verified."""
    return plan.temperature == 0 or run.loaded.config.speculation.verify == "coupled"


def _equality(run: BenchRun, plan: SweepPlan, lines: Sequence[Line]) -> Iterator[str]:
    return equality_lines(lines, _is_comparable(run, plan))


def _print(tables: dict[str, str], notes: Sequence[str], document: dict[str, Any]) -> None:
    for name, table in tables.items():
        print(f"{name}\n{table}\n")
    print("\n".join(notes))
    machine, loads = document["machine"], document["load_average"]
    print(f"machine: {', '.join(f'{name} {value}' for name, value in machine.items())}")
    print(f"load average before / after: {_loads(loads['before'])} / {_loads(loads['after'])}")
    print(f"command: {run_facts.shown_command(document['command'])}")
    print(f"compilations after ready: {document['compilations_after_ready']}")
    print("\n".join(["start-up", *document["start_up"]]))


def _loads(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or "unknown"


def _caption(document: dict[str, Any]) -> str:
    machine = document["machine"]
    return f"{machine['processor']}, {machine['threads']} thread(s), 1 device; {document['date']}"


def _write(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        write_document(path, document)
        print(f"written: {path}")
