"""What an engine has done and holds at one moment, for whoever watches it from another thread.

Owns the numbers and where they are read. They are read without a lock, each by itself: a snapshot
that is taken while a step is committed may count it in one number and not yet in another.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from decodegrid.engine.llm import LLM
from decodegrid.engine.verify_policy import ScheduledVerify


@dataclass(frozen=True, slots=True)
class BudgetSnapshot:
    """How the schedule's predictions stand against what happened; sums over all steps."""

    expected_tokens: float
    measured_tokens: int
    predicted_ms: float
    step_time_ratio: float | None
    """Median of the last steps' times over the surface's; None before there are enough."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Counts since the engine was ready, and what is in use now."""

    num_running: int
    """Requests with a slot, the one that is prefilled included."""
    num_waiting: int
    num_slots: int
    num_blocks_free: int
    num_blocks: int
    num_prefix_tokens: int
    """Tokens that admitted requests needed, cached or not; 0 without a prefix cache."""
    num_prefix_tokens_hit: int
    num_prefill_steps: int
    num_prefill_tokens: int
    prefill_seconds: float
    num_decode_steps: int
    num_decode_rows: int
    decode_seconds: float
    graph_seconds: float
    num_emitted: int
    num_pad_rows: int
    num_surplus_tokens: int
    graph_hits: Mapping[tuple[int, int], int]
    """Replays by (requests, query tokens) of the captured pair."""
    offered: tuple[int, ...]
    """Drafts by position, of which `verified`, of which `accepted`."""
    verified: tuple[int, ...]
    accepted: tuple[int, ...]
    num_compilations_after_ready: int
    num_captured_after_ready: int
    budget: BudgetSnapshot | None
    """None where nothing is scheduled."""


def take_snapshot(llm: LLM) -> EngineSnapshot:
    """Any thread may call it, also after the engine was closed."""
    stats, scheduler = llm.stats, llm.scheduler
    prefix = None if scheduler.prefix is None else scheduler.prefix.stats
    num_rows = stats.num_decode_rows + stats.num_late_rows
    return EngineSnapshot(
        num_running=scheduler.slots.num_usable - scheduler.slots.num_free,
        num_waiting=len(scheduler.waiting),
        num_slots=scheduler.slots.num_usable,
        num_blocks_free=scheduler.blocks.num_free,
        num_blocks=scheduler.blocks.num_usable,
        num_prefix_tokens=0 if prefix is None else prefix.num_tokens,
        num_prefix_tokens_hit=0 if prefix is None else prefix.num_tokens_hit,
        num_prefill_steps=stats.num_prefill_steps,
        num_prefill_tokens=stats.num_prefill_tokens,
        prefill_seconds=stats.prefill_seconds,
        num_decode_steps=stats.num_decode_steps,
        num_decode_rows=stats.num_decode_rows,
        decode_seconds=stats.decode_seconds,
        graph_seconds=stats.graph_seconds,
        num_emitted=stats.num_emitted,
        num_pad_rows=max(0, stats.num_captured_rows - num_rows),
        num_surplus_tokens=max(0, stats.num_captured_query_tokens - stats.num_query_tokens),
        graph_hits=dict(stats.graph_hits),
        offered=tuple(stats.offered_per_position),
        verified=tuple(stats.verified_per_position),
        accepted=tuple(stats.accepted_per_position),
        num_compilations_after_ready=stats.num_compilations_after_ready,
        num_captured_after_ready=stats.num_captured_after_ready,
        budget=_budget(llm),
    )


def _budget(llm: LLM) -> BudgetSnapshot | None:
    policy = llm.scheduler.policy
    if not isinstance(policy, ScheduledVerify) or policy.budget.surface is None:
        return None
    return BudgetSnapshot(
        expected_tokens=policy.expected_tokens,
        measured_tokens=policy.measured_tokens,
        predicted_ms=policy.predicted_ms,
        step_time_ratio=policy.drift.ratio,
    )
