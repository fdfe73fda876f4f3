"""`decodegrid bench`: how fast a deployment decodes and prefills, counted on what it gives out.

Owns the subcommands and what each needs of the deployment. The options are those of
bench_options.py, the passes those of bench_sweep.py and bench_prefill.py, the words those of
bench_report.py. Imports torch only when something runs.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from decodegrid.capture.bench_plot import require_matplotlib
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.bench_drive import ClosedLoop, OpenLoop, Traffic
from decodegrid.engine.bench_options import (
    add_common_options,
    add_policy_options,
    add_workload_options,
    check_common,
    check_contexts,
    check_distinct,
    check_target,
    integers,
    numbers,
    policies_from_options,
    prompt_source,
    teller,
    temperature_of,
)
from decodegrid.engine.bench_policies import SCHEDULES, BenchPolicy
from decodegrid.engine.cli_options import load_from_options
from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from decodegrid.engine.bench_command import BenchRun
    from decodegrid.engine.bench_sweep import SweepPlan


def add_bench_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "bench",
        help="measure decoding, prefill and load",
        description="Measure what a deployment gives out: emitted tokens, counted from the "
        "outputs, with the spread over repeats.",
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    _add_decode(kinds)
    _add_load(kinds)
    _add_prefill(kinds)


def _add_decode(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "decode",
        help="a fixed number of requests at once",
        description="Closed loop: as many requests at once as --batch says, a new one when one "
        "ends. Verify policies are compared on the same prompts and seeds.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--batch",
        type=integers,
        metavar="N,...",
        help="requests at once (default: 1, 4 and scheduler.max_num_reqs, --requests at most)",
    )
    add_policy_options(parser, "every one that the deployment can run")
    add_workload_options(parser, num_requests=16)
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="plot tokens/s a user against tokens/s a device"
    )
    parser.add_argument(
        "--assumed-acceptance",
        type=float,
        default=0.75,
        metavar="A",
        help="of the curve 1 + K * A that is shown beside the measured points, labelled as "
        "assumed (default: 0.75)",
    )
    parser.set_defaults(run=_bench_decode)


def _add_load(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "load",
        help="requests that arrive by themselves",
        description="Open loop: requests arrive as a Poisson process, whatever the engine does, "
        "and their waits count from when they were due. In one process, without a server.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rates", type=numbers, required=True, metavar="R,...", help="requests a second"
    )
    add_policy_options(parser, "none, all, and scheduled where the deployment schedules")
    add_workload_options(parser, num_requests=32)
    parser.set_defaults(run=_bench_load)


def _add_prefill(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "prefill",
        help="prompts of several lengths, one at a time",
        description="Tokens a chunk against its latency, and the time to the first token.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--contexts",
        type=integers,
        metavar="N,...",
        help="tokens of the prompts (default: 16, 64, 256 and 1024, as far as they fit)",
    )
    add_common_options(parser, num_requests=4)
    parser.set_defaults(run=_bench_prefill)


def _bench_decode(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    loaded = load_from_options(args)
    check_common(args, loaded)
    most = loaded.config.scheduler.max_num_reqs
    cap = min(most, args.requests)
    batches = args.batch or sorted({1, min(4, cap), cap})
    check_distinct("--batch", batches)
    for batch in batches:
        if not 1 <= batch <= most:
            raise ValueError(f"--batch has {batch}; allowed are 1..{most} (scheduler.max_num_reqs)")
        if batch > args.requests:
            raise ValueError(f"--batch has {batch}, but a pass has {args.requests} --requests only")
    if not 0.0 <= args.assumed_acceptance <= 1.0:
        raise ValueError(f"--assumed-acceptance is {args.assumed_acceptance}; allowed are 0..1")
    if args.png is not None:
        check_target("--png", args.png)
        require_matplotlib("--png")
        if args.json is not None and args.json.absolute() == args.png.absolute():
            raise ValueError(f"--json and --png are the same file: {args.png}")
    policies = policies_from_options(args, loaded, SCHEDULES)
    run, plan = _comparison(args, loaded, policies, [ClosedLoop(b) for b in batches], build_llm)
    from decodegrid.engine.bench_command import run_decode

    shown = replace(run, png=args.png, assumed_acceptance=args.assumed_acceptance)
    return run_decode(shown, plan)


def _bench_load(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    loaded = load_from_options(args)
    check_common(args, loaded)
    check_distinct("--rates", args.rates)
    for rate in args.rates:
        if not 0.0 < rate < math.inf:
            raise ValueError(f"--rates has {rate:g}; a rate must be above 0 and finite")
    policies = policies_from_options(args, loaded, ("scheduled",), all_fixed=False)
    run, plan = _comparison(args, loaded, policies, [OpenLoop(r) for r in args.rates], build_llm)
    from decodegrid.engine.bench_command import run_load

    return run_load(run, plan)


def _bench_prefill(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    loaded = load_from_options(args)
    check_common(args, loaded)
    most = loaded.config.scheduler.max_model_len - 1
    contexts = args.contexts or [n for n in (16, 64, 256, 1024) if n <= most] or [most]
    check_contexts(contexts, most, "one less than scheduler.max_model_len")
    source = prompt_source(args)
    from decodegrid.engine.bench_command import BenchRun, prompts_of, run_prefill
    from decodegrid.engine.bench_prefill import PrefillPlan

    prompts = prompts_of(
        loaded,
        source,
        contexts,
        num_requests=args.requests,
        num_repeats=args.warm_up + args.repeats,
        seed=args.seed,
        max_tokens=1,
    )
    run = BenchRun(loaded, build_llm, source.describe(), teller(args), args.json)
    return run_prefill(run, PrefillPlan(tuple(contexts), prompts, args.warm_up, args.repeats))


def _comparison(
    args: argparse.Namespace,
    loaded: LoadedConfig,
    policies: tuple[BenchPolicy, ...],
    traffics: Sequence[Traffic],
    build_llm: Callable[[LoadedConfig], LLM],
) -> "tuple[BenchRun, SweepPlan]":
    """What decode and load have in common. Raises ValueError."""
    temperature = temperature_of(args, loaded)
    SamplingParams(temperature=temperature, max_tokens=args.max_tokens)
    room = loaded.config.scheduler.max_model_len - args.max_tokens
    if room < 2:
        raise ValueError(
            f"--max-tokens is {args.max_tokens}; scheduler.max_model_len = "
            f"{loaded.config.scheduler.max_model_len} leaves no room for a prompt of 2 tokens"
        )
    if args.contexts is not None:
        what = f"scheduler.max_model_len less --max-tokens {args.max_tokens}"
        check_contexts(args.contexts, room, what)
    source = prompt_source(args)
    # Imported here: all the rest is checked before torch is loaded.
    from decodegrid.engine.bench_command import BenchRun, prompts_of
    from decodegrid.engine.bench_sweep import SweepPlan

    contexts: tuple[int | None, ...] = tuple(args.contexts or [None])
    prompts = prompts_of(
        loaded,
        source,
        contexts,
        num_requests=args.requests,
        num_repeats=args.warm_up + args.repeats,
        seed=args.seed,
        max_tokens=args.max_tokens,
    )
    plan = SweepPlan(
        traffics=tuple(traffics),
        policies=policies,
        contexts=contexts,
        prompts=prompts,
        warm_up=args.warm_up,
        repeats=args.repeats,
        seed=args.seed,
        max_tokens=args.max_tokens,
        temperature=temperature,
        ignore_eos=args.ignore_eos,
    )
    return BenchRun(loaded, build_llm, source.describe(), teller(args), args.json), plan
