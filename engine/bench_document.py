"""The benchmark's result as JSON: what was measured, on what, with which command.

Owns the document's keys. Data flow: the lines of a report and the facts of the run -> a dictionary
-> a file.
"""

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from decodegrid.configs.load import LoadedConfig
from decodegrid.engine import run_facts
from decodegrid.engine.bench_drive import ClosedLoop
from decodegrid.engine.bench_policies import TableVerify
from decodegrid.engine.bench_report import Line
from decodegrid.engine.bench_summary import pass_json
from decodegrid.engine.bench_sweep import SweepPlan, SweepResult
from decodegrid.engine.llm import LLM
from decodegrid.engine.verify_policy import ScheduledVerify, VerifyPolicy

FORMAT = 1


def run_document(
    kind: str, loaded: LoadedConfig, llm: LLM, load_before: Sequence[float], method: Sequence[str]
) -> dict[str, Any]:
    """What every kind of benchmark says of its run.

    kind: the subcommand. load_before: the system's load before the first pass.
    """
    stats = llm.stats
    return {
        "format": FORMAT,
        "kind": f"decodegrid bench {kind}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": run_facts.command(),
        "machine": run_facts.machine(torch.device(loaded.config.model.device)),
        "versions": run_facts.versions(),
        "config_hash": run_facts.config_hash(loaded),
        "load_average": {"before": list(load_before), "after": run_facts.load_average()},
        "devices": 1,
        "method": list(method),
        "start_up": llm.start_up_report.splitlines(),
        "compilations_after_ready": stats.num_compilations_after_ready,
        "captured_after_ready": stats.num_captured_after_ready,
    }


def setting_documents(
    lines: Sequence[Line], plan: SweepPlan, result: SweepResult
) -> list[dict[str, Any]]:
    """One object for each setting, with its passes."""
    found = []
    for line in lines:
        setting, traffic = line.setting, line.setting.traffic
        policy = result.policies[setting]
        is_closed = isinstance(traffic, ClosedLoop)
        entry: dict[str, Any] = {
            "context_len": setting.context_len,
            "batch": traffic.batch if isinstance(traffic, ClosedLoop) else None,
            "rate": None if isinstance(traffic, ClosedLoop) else traffic.rate,
            "loop": "closed" if is_closed else "open",
            "policy": setting.policy.name,
            "policy_meaning": setting.policy.meaning,
            "policy_status": _status(policy),
            "over_first_policy": None if line.over_first is None else line.over_first.as_json(),
            "same_outputs": line.num_same,
            "compared_outputs": line.num_compared,
            **line.summary.as_json(),
            "repeats": [
                pass_json(each, plan.seed_of(plan.warm_up + repeat))
                for repeat, each in enumerate(result.passes[setting])
            ],
        }
        if isinstance(policy, TableVerify):
            entry["rows_as_foreseen"] = [policy.num_as_foreseen, policy.num_rows]
        found.append(entry)
    return found


def _status(policy: VerifyPolicy) -> list[str]:
    """What a policy says of its passes, without where its surface is kept: that names a home."""
    if not isinstance(policy, ScheduledVerify):
        return policy.status()
    surface = policy.budget.surface
    assert surface is not None, "a schedule of the benchmark has a surface"
    measured = datetime.fromtimestamp(surface.measured_at, UTC).isoformat(timespec="seconds")
    first = f"surface: {len(surface.points)} pairs, context {surface.context_len}, {measured}"
    return [first, *policy.status()[1:]]


def workload_document(plan: SweepPlan, prompts: str) -> dict[str, Any]:
    """The requests."""
    return {
        "prompts": prompts,
        "requests": len(plan.prompts[0][0]),
        "prompt_tokens": [
            {
                "context_len": context_len,
                "least": min(len(prompt) for repeat in repeats for prompt in repeat),
                "greatest": max(len(prompt) for repeat in repeats for prompt in repeat),
            }
            for context_len, repeats in zip(plan.contexts, plan.prompts, strict=True)
        ],
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "ignore_eos": plan.ignore_eos,
        "seed": plan.seed,
        "repeats": plan.repeats,
        "warm_up": plan.warm_up,
    }


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write it whole or not at all. Raises OSError."""
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    part = path.parent / f".{path.name}.tmp"
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
