"""Runs the passes of a comparison: contexts x repeats x traffic x policies, on one engine.

Owns the order of the passes, their seeds and the policies between them. All policies of a repeat
get the same prompts, seeds and arrival times; they take turns, every second repeat backwards, so
that a slow time of the machine hits them alike. The passes before the first repeat warm up and are
not reported; no other pass is left out. Data flow: `SweepPlan` and an LLM -> `run_pass` for each ->
`SweepResult`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from decodegrid.engine.bench_drive import ClosedLoop, PassRequest, Traffic, run_pass
from decodegrid.engine.bench_policies import TABLED, BenchPolicy, Speculation, TableVerify
from decodegrid.engine.bench_stats import BenchPass, StepObserver
from decodegrid.engine.bench_tables import (
    DraftNotes,
    DraftTables,
    oracle_tables,
    random_tables,
)
from decodegrid.engine.llm import LLM
from decodegrid.engine.runner import Runner
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.verify_policy import FixedVerify, ScheduledVerify, VerifyPolicy

Prompts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What is compared."""

    traffics: tuple[Traffic, ...]
    policies: tuple[BenchPolicy, ...]
    contexts: tuple[int | None, ...]
    """Tokens of each prompt; None for prompts as they are."""
    prompts: tuple[tuple[Prompts, ...], ...]
    """By context, then by repeat, those that warm up first."""
    warm_up: int
    repeats: int
    seed: int
    max_tokens: int
    temperature: float
    ignore_eos: bool

    def seed_of(self, repeat: int) -> int:
        """Of a repeat's first request, the next ones follow; repeats have no seed in common."""
        return self.seed + repeat * len(self.prompts[0][0])


@dataclass(frozen=True, slots=True)
class Setting:
    """What the passes of all repeats have in common."""

    context_len: int | None
    traffic: Traffic
    policy: BenchPolicy

    def __str__(self) -> str:
        where = "" if self.context_len is None else f"context {self.context_len}, "
        return f"{where}{self.traffic}, {self.policy.name}"


@dataclass(slots=True)
class SweepResult:
    """What came of it."""

    passes: dict[Setting, list[BenchPass]] = field(default_factory=dict)
    """By setting, one for each repeat that counts."""
    policies: dict[Setting, VerifyPolicy] = field(default_factory=dict)
    """Each setting has its own, which learns over all its passes."""
    num_uncounted: int = 0
    """Passes that warmed up, or that brought the tables of oracle and random."""


def run_sweep(llm: LLM, plan: SweepPlan, tell: Callable[[str], None]) -> SweepResult:
    """Every pass of a plan; `tell` gets a line for each.

    The LLM's prefix cache is off from then on: prompts come again with every policy, and all but
    the first would find theirs computed. Raises RequestError for a prompt that does not fit;
    ValueError for a deployment without a surface where a schedule needs one.
    """
    llm.scheduler.prefix = None
    result = SweepResult()
    for context, context_len in enumerate(plan.contexts):
        settings = [
            Setting(context_len, traffic, policy)
            for traffic in plan.traffics
            for policy in plan.policies
        ]
        for setting in settings:
            result.policies[setting] = make_policy(llm, setting.policy)
            result.passes[setting] = []
        for repeat in range(plan.warm_up + plan.repeats):
            _run_repeat(llm, plan, context, repeat, settings, result, tell)
    return result


def _run_repeat(
    llm: LLM,
    plan: SweepPlan,
    context: int,
    repeat: int,
    settings: Sequence[Setting],
    result: SweepResult,
    tell: Callable[[str], None],
) -> None:
    prompts, seed = plan.prompts[context][repeat], plan.seed_of(repeat)
    tables: dict[str, DraftTables] = {}
    if any(policy.name in TABLED for policy in plan.policies):
        tables = _first_pass(llm, plan, prompts, seed)
        result.num_uncounted += 1
    counts = repeat >= plan.warm_up
    word = f"repeat {repeat - plan.warm_up + 1}/{plan.repeats}" if counts else "warm-up"
    for setting in settings if repeat % 2 == 0 else reversed(settings):
        policy = result.policies[setting]
        observers: list[StepObserver] = []
        if isinstance(policy, TableVerify):
            policy.set_tables(tables[setting.policy.name])
            observers.append(policy.observe)
        speculation = setting.policy.speculation(llm.limits.num_draft_tokens)
        requests = _requests(plan, prompts, seed, speculation)
        found = run_pass(llm, requests, policy, setting.traffic, seed=seed, observers=observers)
        if counts:
            result.passes[setting].append(found)
        else:
            result.num_uncounted += 1
        tell(f"{word}: {setting}: {found.tokens_per_s:.4g} tokens/s in {found.wall_s:.2f} s")


def _first_pass(llm: LLM, plan: SweepPlan, prompts: Prompts, seed: int) -> dict[str, DraftTables]:
    """The tables of each tabled policy, from a pass that verifies no draft."""
    notes = DraftNotes()
    requests = _requests(plan, prompts, seed, "auto")
    traffic = ClosedLoop(llm.limits.max_num_reqs)
    run_pass(llm, requests, FixedVerify(1), traffic, observers=[notes])
    tables = notes.tables(llm.limits.num_draft_tokens)
    return {"oracle": oracle_tables(tables), "random": random_tables(tables, seed)}


def _requests(
    plan: SweepPlan, prompts: Prompts, seed: int, speculation: Speculation
) -> list[PassRequest]:
    return [
        PassRequest(
            prompt,
            SamplingParams(
                temperature=plan.temperature,
                max_tokens=plan.max_tokens,
                seed=seed + index,
                ignore_eos=plan.ignore_eos,
                speculation=speculation,
            ),
        )
        for index, prompt in enumerate(prompts)
    ]


def make_policy(llm: LLM, policy: BenchPolicy) -> VerifyPolicy:
    """A fresh policy, which has learnt nothing. Raises ValueError as run_sweep does."""
    if policy.num_drafts is not None:
        return FixedVerify(1) if policy.num_drafts == 0 else FixedVerify()
    own = llm.scheduler.policy
    if not isinstance(own, ScheduledVerify) or own.budget.surface is None:
        raise ValueError(
            f"--policies has {policy.name}, but the deployment has no step-time surface: "
            "speculation.verify_tokens = scheduled and surface.repeats above 0 measure one"
        )
    num_slots = llm.limits.max_num_reqs + 1
    if policy.name == "scheduled":
        return ScheduledVerify(own.budget, num_slots, fresh_rates=own.fresh_rates, note=own.note)
    runner = llm.stream_table.loop.runner
    if not isinstance(runner, Runner):
        raise ValueError(f"--policies has {policy.name}, which needs the confidences of a device")
    confidence = runner.model.state.slots.confidence
    width = llm.limits.num_draft_tokens

    def write(slots: Sequence[int], values: NDArray[np.float32]) -> None:
        rows = torch.tensor(slots, device=confidence.device)
        confidence[rows, :width] = torch.from_numpy(values).to(confidence)

    return TableVerify(
        own.budget,
        num_slots,
        lambda: llm.scheduler.running,
        write,
        wide=confidence.dtype == torch.float64,
    )
