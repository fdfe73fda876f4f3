"""Verify policies and ways to verify, compared on whole requests.

Owns the deployments, the mixed workloads and the ratios. One runner serves the three policies of a
load in turns: the measured schedule, every draft, and no draft. A deployment without a drafter runs
beside them, because a draft that is made and not verified still costs its making. Loads are 1, 8
and 32 requests at once, structured prompts and stories in turns.
"""

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.deployments import ALONE, WITHOUT_DRAFTER, Deployment, start
from benchmarks.generation import Run, Workload, compare_llms, run_workload
from benchmarks.prompts import STORIES, STRUCTURED, encode_prompts
from benchmarks.results import format_rows
from benchmarks.timing import Spread, paired_ratio
from decodegrid.configs.load import load_config
from decodegrid.engine.llm import LLM
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.verify_policy import FixedVerify, ScheduledVerify, VerifyPolicy

LOADS = (1, 8, 32)
TEMPERATURES = (0.7, 1.0)
LARGE = (
    *ALONE,
    "scheduler.max_num_reqs=32",
    # Prompts first, so that a batch of 32 is one.
    "scheduler.decode_steps_per_prefill_chunk=0",
    "speculation.verify_tokens=scheduled",
)
REJECTION = (*ALONE, "speculation.verify=rejection", "speculation.verify_tokens=all")


@dataclasses.dataclass(frozen=True, slots=True)
class ServingPlan:
    """How much is measured."""

    repeats: int
    max_tokens: int
    num_single: int
    """Prompts that are decoded one at a time."""
    loads: tuple[int, ...] = LOADS
    """Requests at once, up to 32; the comparison of ways to verify goes with all LOADS."""


def measure_serving(path: Path | None, plan: ServingPlan) -> dict[str, Any]:
    """Policies at every load, then coupled against rejection; prints as it goes."""
    large = start(load_config(path, LARGE))
    plain = start(load_config(path, (*LARGE, *WITHOUT_DRAFTER)))
    result: dict[str, Any] = {"scheduled_over_all": {}, "scheduled_over_none": {}}
    result |= {"scheduled_over_no_drafter": {}, "fresh_over_delayed": {}, "loads": {}}
    for load in plan.loads:
        ratios, details = _compare_policies(large, plain, load, plan)
        for name, value in ratios.items():
            result[name][f"b{load}"] = value.median
        result["loads"][f"b{load}"] = details
    deployments = [large, plain]
    if plan.loads == LOADS:
        deployments.append(start(load_config(path, REJECTION)))
        compared = _compare_verification(large, deployments[-1], plan)
        result["coupled_over_rejection"] = compared
    after = sum(d.runner.counters.compilations_after_ready for d in deployments)
    result["compilations_after_ready"] = after
    print(f"\ncompilations after ready: {after}")
    return result


def _prompts(deployment: Deployment) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    tokenizer = deployment.loaded.checkpoint_dir / "tokenizer.json"
    return encode_prompts(STRUCTURED, tokenizer), encode_prompts(STORIES, tokenizer)


def mixed_workload(deployment: Deployment, load: int, plan: ServingPlan) -> Workload:
    """Structured prompts and stories in turns, repeated with other seeds to fill the load."""
    structured, stories = _prompts(deployment)
    mixed = [prompt for pair in zip(structured, stories, strict=True) for prompt in pair]
    count = plan.num_single if load == 1 else max(load, len(mixed))
    prompts = [mixed[index % len(mixed)] for index in range(count)]
    return Workload(f"mixed, {load} at once", tuple(prompts), load, plan.max_tokens)


def _llm(deployment: Deployment, policy: VerifyPolicy) -> LLM:
    steps = deployment.loaded.config.scheduler.decode_steps_per_prefill_chunk
    tokenizer = Tokenizer(deployment.loaded.checkpoint_dir / "tokenizer.json")
    return LLM.from_runner(
        deployment.runner, tokenizer, decode_steps_per_prefill_chunk=steps, policy=policy
    )


def _scheduled(deployment: Deployment, *, fresh: bool) -> ScheduledVerify:
    made = deployment.make_llm().scheduler.policy
    if not isinstance(made, ScheduledVerify):
        raise ValueError("the deployment does not schedule its verify tokens")
    return ScheduledVerify(
        made.budget, deployment.runner.max_num_reqs + 1, fresh_rates=fresh, note=made.note
    )


def _compare_policies(
    large: Deployment, plain: Deployment, load: int, plan: ServingPlan
) -> tuple[dict[str, Spread], dict[str, Any]]:
    llms = {
        "scheduled": _llm(large, _scheduled(large, fresh=False)),
        "fresh": _llm(large, _scheduled(large, fresh=True)),
        "all": _llm(large, FixedVerify()),
        "none": _llm(large, FixedVerify(1)),
        "no drafter": _llm(plain, FixedVerify()),
    }
    workload = mixed_workload(large, load, plan)
    runs = compare_llms(llms, workload, plan.repeats)
    rates = {name: [run.rate for run in found] for name, found in runs.items()}
    # Seconds for each token, so that a ratio above 1 means that the first one is faster.
    costs = {name: [1 / rate for rate in values] for name, values in rates.items()}
    ratios = {
        "scheduled_over_all": paired_ratio(costs["all"], costs["scheduled"]),
        "scheduled_over_none": paired_ratio(costs["none"], costs["scheduled"]),
        "scheduled_over_no_drafter": paired_ratio(costs["no drafter"], costs["scheduled"]),
        "fresh_over_delayed": paired_ratio(costs["scheduled"], costs["fresh"]),
    }
    print(f"\n{workload.name}, T=0.7: min / median / max over repeats")
    print(format_rows([(name.replace("_", " "), value, "x") for name, value in ratios.items()]))
    details = {name: _describe(found) for name, found in runs.items()}
    for name, facts in details.items():
        print(
            f"  {name}: {facts['tokens_per_s']:.1f} tokens/s, {facts['tokens_per_round']:.2f} "
            f"tokens a round, {facts['verified_per_round']:.2f} drafts verified"
        )
    print("\n".join(llms["scheduled"].scheduler.policy.status()))
    return ratios, details


def _describe(runs: list[Run]) -> dict[str, float]:
    rates = sorted(run.rate for run in runs)
    rounds = sum(run.num_rounds for run in runs)
    return {
        "tokens_per_s": rates[len(rates) // 2],
        "tokens_per_round": sum(run.num_emitted for run in runs) / rounds,
        "verified_per_round": sum(sum(run.verified) for run in runs) / rounds,
    }


def _compare_verification(
    coupled: Deployment, rejection: Deployment, plan: ServingPlan
) -> dict[str, Any]:
    """Accepted drafts a round, all being verified: coupled over rejection."""
    llms = {
        "coupled": _llm(coupled, FixedVerify()),
        "rejection": _llm(rejection, FixedVerify()),
    }
    found: dict[str, Any] = {}
    print("\naccepted drafts a round, all verified: coupled / rejection")
    for domain, prompts in zip(("structured", "stories"), _prompts(coupled), strict=True):
        for temperature in TEMPERATURES:
            # Acceptance is counted, not timed: other seeds say more than the same ones again.
            runs: dict[str, list[Run]] = {name: [] for name in llms}
            for repeat in range(plan.repeats):
                workload = Workload(
                    domain, tuple(prompts), 8, plan.max_tokens, temperature, 5000 + 100 * repeat
                )
                for name, llm in llms.items():
                    runs[name].append(run_workload(llm, workload))
            accepted = {
                name: sum(sum(run.accepted) for run in each) / sum(run.num_rounds for run in each)
                for name, each in runs.items()
            }
            ratio = accepted["coupled"] / accepted["rejection"]
            found[f"{domain}_t{temperature:g}"] = ratio
            print(
                f"  {domain}, T={temperature:g}: {accepted['coupled']:.2f} / "
                f"{accepted['rejection']:.2f} = {ratio:.2f}"
            )
    return found
