"""The decode benchmark: `python -m benchmarks.decode [--json FILE] [--config FILE] [--quick]`.

One run starts the deployment (and, beside it, the same without drafter and with 16 times the pool)
and prints ratios: eager step over captured step, drafts over no drafts, long context over short,
large pool over small. Owns the order of the measurements and the printing. Contenders take turns;
every line gives min / median / max over the repeats. The numbers mean something only on a machine
that does nothing else meanwhile.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.deployments import (
    ALONE,
    STEP_KEYS,
    WITHOUT_DRAFTER,
    Deployment,
    load_deployment,
    start,
)
from benchmarks.generation import (
    Run,
    Workload,
    acceptance,
    compare_llms,
    run_workload,
    same_output_share,
)
from benchmarks.host_time import hollow_runner, host_seconds
from benchmarks.machine import describe_machine, read_memory
from benchmarks.peaks import measure_peaks
from benchmarks.prompts import STORIES, STRUCTURED, encode_prompts
from benchmarks.results import format_rows, write_result
from benchmarks.step_time import (
    StepBench,
    compare_runners,
    count_region_calls,
    eager_runner,
    empty_region_seconds,
)
from benchmarks.timing import Spread, interleave, paired_ratio, spread
from decodegrid.capture.grid import GraphKey
from decodegrid.capture.lowering import CompileOptions
from decodegrid.configs.load import load_config
from decodegrid.engine.ledger_work import StepShape, step_work

SHORT_CONTEXT, LONG_CONTEXT = 64, 1000
POOL_FACTOR = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    repeats: int
    max_tokens: int
    num_host_steps: int
    num_single_prompts: int
    """Prompts of a workload that decodes one at a time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; 2 for arguments or a deployment that cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--config", type=Path, metavar="FILE", help="deployment; default tiny.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--repeats", type=int, default=7, metavar="N")
    parser.add_argument("--quick", action="store_true", help="2 repeats of less; a smoke test")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    plan = Plan(2, 16, 40, 2) if args.quick else Plan(args.repeats, 96, 300, 8)
    try:
        result = measure(args.config, tuple(args.overrides), plan)
        if args.json is not None:
            write_result(result, args.json)
    except (ValueError, OSError) as error:
        print(f"benchmarks.decode: error: {error}", file=sys.stderr)
        return 2
    return 0


def measure(path: Path | None, overrides: tuple[str, ...], plan: Plan) -> dict[str, Any]:
    """All measurements in order; memory first, before anything else is started beside."""
    loaded = load_deployment(path, overrides)
    main_deployment = start(loaded)
    result: dict[str, Any] = _report_start(main_deployment, plan)
    result |= _report_steps(main_deployment, plan)
    result |= _report_host(main_deployment, plan)
    result |= _report_pool(main_deployment, path, overrides, plan)
    plain = start(load_config(path, (*ALONE, *overrides, *WITHOUT_DRAFTER)))
    result |= _report_generation(main_deployment, plain, plan)
    after = [d.runner.counters.compilations_after_ready for d in (main_deployment, plain)]
    result["compilations_after_ready"] = sum(after)
    print(f"\ncompilations after ready: {sum(after)}")
    return result


def _report_start(deployment: Deployment, plan: Plan) -> dict[str, Any]:
    """Phase table, and memory once a full batch has been decoded."""
    run_workload(deployment.make_llm(), _workloads(deployment, plan)["structured_b8"])
    memory, machine, clock = read_memory(), describe_machine(), deployment.clock
    state = "held earlier compilations" if deployment.had_compile_cache else "was empty"
    print(f"{machine['cpu_model']}, {machine['torch_threads']} threads, {machine['versions']}")
    print(f"\nstart of {deployment.loaded.path.name} (the compile cache {state})")
    print(clock.format())
    print(
        f"memory after one full batch: peak {memory.peak_rss_mib:.0f} MiB (VmHWM, start-up "
        f"included), now {memory.rss_mib:.0f} MiB (VmRSS)"
    )
    return {
        **machine,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "repeats": plan.repeats,
        "capture_s": clock.wall_seconds,
        "capture_phases_s": {line.name: line.seconds for line in clock.table()},
        "had_compile_cache": deployment.had_compile_cache,
        "peak_rss_mib": memory.peak_rss_mib,
        "rss_mib": memory.rss_mib,
        "num_compilations": deployment.runner.num_compilations,
        "num_captured": deployment.runner.num_captured,
    }


def _report_steps(deployment: Deployment, plan: Plan) -> dict[str, Any]:
    """Eager against captured, the roofline, dispatch, and context."""
    runner = deployment.runner
    bench = StepBench(runner, SHORT_CONTEXT)
    runners = {"captured": runner, "eager": eager_runner(runner, STEP_KEYS)}
    samples = {key: compare_runners(bench, runners, key, plan.repeats) for key in STEP_KEYS}
    ratios = {
        _name(key): paired_ratio(found["eager"], found["captured"])
        for key, found in samples.items()
    }
    print(f"\nstep at a context of {SHORT_CONTEXT} tokens: min / median / max")
    rows = []
    for key, found in samples.items():
        for kind, seconds in found.items():
            rows.append((f"{kind} {key}", spread(seconds).scaled(1e3), "ms"))
        rows.append((f"eager / captured {key}", ratios[_name(key)], "x"))
    print(format_rows(rows))
    captured = {key: spread(found["captured"]) for key, found in samples.items()}
    return {
        "eager_over_grid": {name: ratio.median for name, ratio in ratios.items()},
        "eager_over_grid_spread": {name: ratio.as_json() for name, ratio in ratios.items()},
        "step_ms": {
            _name(key): {kind: spread(s).scaled(1e3).as_json() for kind, s in found.items()}
            for key, found in samples.items()
        },
        **_report_roofline(deployment, captured, plan),
        **_report_dispatch(deployment, captured[STEP_KEYS[0]], plan),
        **_report_context(deployment, plan),
    }


def _report_roofline(
    deployment: Deployment, captured: dict[GraphKey, Spread], plan: Plan
) -> dict[str, Any]:
    """Work of each step against what the machine reached in the same minutes."""
    model, peaks = deployment.runner.model, measure_peaks(plan.repeats)
    print(
        f"\nroofline: read {peaks.read_bytes_per_s / 1e9:.1f} GB/s, copy "
        f"{peaks.copy_bytes_per_s / 1e9:.1f} GB/s, fp32 product {peaks.flops_per_s / 1e9:.1f} "
        "GFLOP/s; a floor from caches can be lower"
    )
    found = {}
    for key, seconds in captured.items():
        shape = StepShape(
            key.num_reqs, key.num_query_tokens, SHORT_CONTEXT, deployment.runner.num_draft_tokens
        )
        work = step_work(model.weights, model.config, shape)
        floor = work.floor_seconds(peaks.bytes_per_s, peaks.flops_per_s)
        found[_name(key)] = {
            "weight_mb": work.weight_bytes / 1e6,
            "state_mb": work.state_bytes / 1e6,
            "mflop": work.flops / 1e6,
            "floor_ms": floor * 1e3,
            "floor_over_step": floor / seconds.median,
        }
        print(
            f"  {key!s:<8} weights {work.weight_bytes / 1e6:7.1f} MB, state "
            f"{work.state_bytes / 1e6:6.2f} MB, {work.flops / 1e6:8.1f} MFLOP: floor "
            f"{floor * 1e3:.3f} ms, {floor / seconds.median:.1%} of the step"
        )
    return {
        "roofline": found,
        "peaks": {
            "read_gb_per_s": peaks.read_bytes_per_s / 1e9,
            "copy_gb_per_s": peaks.copy_bytes_per_s / 1e9,
            "gflop_per_s": peaks.flops_per_s / 1e9,
        },
    }


def _report_dispatch(deployment: Deployment, step: Spread, plan: Plan) -> dict[str, Any]:
    """(cost of a captured region that does next to nothing) x (regions), share of the step."""
    config, key = deployment.loaded.config, STEP_KEYS[0]
    num_calls, num_tensors = count_region_calls(deployment.runner, key)
    options = CompileOptions(
        config.compile.backend, deployment.loaded.cache_dir, config.model.num_threads
    )
    empty = spread(empty_region_seconds(options, round(num_tensors), plan.repeats + 3))
    share = empty.median * num_calls / step.median
    print(
        f"\ndispatch: {num_calls} regions of {num_tensors:.1f} tensors x "
        f"{empty.scaled(1e6)} us = {empty.median * num_calls * 1e3:.3f} ms, "
        f"{share:.1%} of the step {key}"
    )
    return {
        "dispatch": {
            "num_regions": num_calls,
            "empty_region_us": empty.scaled(1e6).as_json(),
            "share_of_1x1": share,
        }
    }


def _report_context(deployment: Deployment, plan: Plan) -> dict[str, Any]:
    """The captured step at both contexts; the two take turns as far as refilling slots allows."""
    runner = deployment.runner
    rows, result = [], {}
    times: dict[str, list[float]] = {}
    for repeat in range(plan.repeats):
        contexts = [SHORT_CONTEXT, LONG_CONTEXT][:: 1 if repeat % 2 == 0 else -1]
        for context in contexts:
            bench = StepBench(runner, context)
            for key in STEP_KEYS[1], STEP_KEYS[3]:
                times.setdefault(f"{key} at {context}", []).append(bench.seconds(runner, key))
    for key in STEP_KEYS[1], STEP_KEYS[3]:
        short, long = (times[f"{key} at {c}"] for c in (SHORT_CONTEXT, LONG_CONTEXT))
        ratio = paired_ratio(long, short)
        rows.append((f"{key} at {SHORT_CONTEXT}", spread(short).scaled(1e3), "ms"))
        rows.append((f"{key} at {LONG_CONTEXT}", spread(long).scaled(1e3), "ms"))
        rows.append((f"{key} long / short", ratio, "x"))
        result[_name(key)] = ratio.as_json()
    print(f"\ncontext of {SHORT_CONTEXT} and {LONG_CONTEXT} tokens")
    print(format_rows(rows))
    return {"context_1000_over_64": result}


def _report_host(deployment: Deployment, plan: Plan) -> dict[str, Any]:
    """Loop steps with empty graphs; see host_time.py."""
    hollow = hollow_runner(deployment.runner)
    samples = interleave(
        {
            f"b{n}": lambda n=n: host_seconds(hollow, n, plan.num_host_steps)  # type: ignore[misc]
            for n in (1, 8)
        },
        plan.repeats,
    )
    found = {name: spread(seconds).scaled(1e6) for name, seconds in samples.items()}
    print("\nhost time of a step (the engine's loop and runner, with graphs that run nothing)")
    print(format_rows((name, value, "us") for name, value in found.items()))
    return {
        "scheduler_us_per_step": {name: value.median for name, value in found.items()},
        "scheduler_us_spread": {name: value.as_json() for name, value in found.items()},
    }


def _report_pool(
    deployment: Deployment, path: Path | None, overrides: tuple[str, ...], plan: Plan
) -> dict[str, Any]:
    """The captured step with the pool as it is and 16 times as large."""
    blocks = deployment.runner.num_blocks * POOL_FACTOR
    sizes = ("cache.pool_bytes=0", "cache.memory_fraction=0", f"cache.num_blocks={blocks}")
    large = start(load_config(path, (*ALONE, *overrides, *sizes)))
    benches = {"x1": StepBench(deployment.runner, SHORT_CONTEXT)}
    benches[f"x{POOL_FACTOR}"] = StepBench(large.runner, SHORT_CONTEXT)
    print(f"\npool of {deployment.runner.num_blocks} and {blocks} blocks")
    result = {}
    for key in STEP_KEYS[1], STEP_KEYS[3]:
        samples = interleave(
            {
                name: lambda b=bench, k=key: b.seconds(b.runner, k)  # type: ignore[misc]
                for name, bench in benches.items()
            },
            plan.repeats,
        )
        ratio = paired_ratio(samples[f"x{POOL_FACTOR}"], samples["x1"])
        rows = [(f"{key} {n}", spread(s).scaled(1e3), "ms") for n, s in samples.items()]
        print(format_rows([*rows, (f"{key} large / small", ratio, "x")]))
        result[_name(key)] = ratio.as_json()
    return {"pool_16_over_1": result}


def _report_generation(drafting: Deployment, plain: Deployment, plan: Plan) -> dict[str, Any]:
    """Rates with and without drafter on every workload."""
    llms = {"drafts": drafting.make_llm(), "no drafts": plain.make_llm()}
    gains: dict[str, float] = {}
    details: dict[str, Any] = {}
    print("\nemitted tokens/s outside prefill, temperature 0.7")
    for name, workload in _workloads(drafting, plan).items():
        runs = compare_llms(llms, workload, plan.repeats)
        rates = {kind: [run.rate for run in found] for kind, found in runs.items()}
        gain = paired_ratio(rates["drafts"], rates["no drafts"])
        gains[name] = gain.median
        details[name] = _describe_runs(runs, gain)
        rows = [(f"{name} {kind}", spread(values), "tokens/s") for kind, values in rates.items()]
        print(format_rows([*rows, (f"{name} gain", gain, "x")]))
        shares = " ".join(f"{share:.0%}" for share in details[name]["acceptance"])
        print(
            f"    {details[name]['tokens_per_round']:.2f} tokens a round; accepted of verified by "
            f"position: {shares}; with prefill {details[name]['gain_with_prefill']['median']:.2f} "
            f"x; same tokens: {details[name]['same_output_share']:.0%}"
        )
    return {"draft_gain": gains, "draft_details": details}


def _describe_runs(runs: dict[str, list[Run]], gain: Spread) -> dict[str, Any]:
    """What a workload's runs have beside the gain."""
    with_prefill = {kind: [run.rate_with_prefill for run in f] for kind, f in runs.items()}
    last, plain = runs["drafts"][-1], runs["no drafts"][-1]
    return {
        "gain": gain.as_json(),
        "gain_with_prefill": paired_ratio(
            with_prefill["drafts"], with_prefill["no drafts"]
        ).as_json(),
        "tokens_per_s": {kind: spread([r.rate for r in f]).as_json() for kind, f in runs.items()},
        "num_emitted": last.num_emitted,
        "tokens_per_round": last.num_emitted / last.num_rounds,
        "acceptance": acceptance(last),
        "same_output_share": same_output_share(last, plain),
    }


def _workloads(deployment: Deployment, plan: Plan) -> dict[str, Workload]:
    """The four workloads, in the order of the result's keys."""
    tokenizer = deployment.loaded.checkpoint_dir / "tokenizer.json"
    found = {}
    for batch in (1, 8):
        for kind, prompts in (("structured", STRUCTURED), ("stories", STORIES)):
            count = plan.num_single_prompts if batch == 1 else len(prompts)
            ids = encode_prompts(prompts[:count], tokenizer)
            name = f"{kind}_b{batch}"
            found[name] = Workload(name, tuple(ids), batch, plan.max_tokens)
    return found


def _name(key: GraphKey) -> str:
    return f"{key.num_reqs}x{key.num_query_tokens}"


if __name__ == "__main__":
    raise SystemExit(main())
