"""From the ring of an engine to a dump: who ran, what each step started from, what it brought back.

Owns the choice of what goes into a dump. Reads host values only. Data flow: StepRing and the facts
of the deployment -> Dump.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter
from typing import Any, Literal

import numpy as np
from pydantic import JsonValue

from decodegrid import __version__
from decodegrid.configs.load import EMBEDDED_CHECKPOINTS, LoadedConfig
from decodegrid.engine.replay_dump import (
    ChunkFacts,
    DecodeFacts,
    Dump,
    Key,
    RequestFacts,
    RichFacts,
    RowFacts,
    Sizes,
    Versions,
)
from decodegrid.engine.request import Request
from decodegrid.engine.runner_protocol import RichRequest, StepResult, StepRunner
from decodegrid.engine.step_ring import ChunkRecord, DecodeRecord, StepRing

Reason = Literal["fault", "crash", "stall"]

STEP_SECTIONS = ("model", "scheduler", "prefill", "cache", "speculation", "grid", "compile")
"""Sections of a deployment that decide what a step computes; the hash is over these."""
_NOT_OF_A_STEP = {"compile": {"cache_dir", "progress"}}


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change while an engine runs."""

    versions: Versions
    sizes: Sizes
    facts: Mapping[str, str]
    config: dict[str, JsonValue] | None
    config_hash: str | None


def config_values(loaded: LoadedConfig) -> dict[str, JsonValue]:
    """A deployment's values by section, with paths that mean the same from any directory."""
    values: dict[str, Any] = loaded.config.model_dump(mode="json")
    if loaded.config.model.checkpoint not in EMBEDDED_CHECKPOINTS:
        values["model"]["checkpoint"] = str(loaded.checkpoint_dir)
    if loaded.config.compile.cache_dir:
        values["compile"]["cache_dir"] = str(loaded.cache_dir)
    return values


def step_values(config: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Dotted keys and values of a deployment that decide what a step computes."""
    found: dict[str, JsonValue] = {}
    for section in STEP_SECTIONS:
        values = config.get(section)
        for key, value in values.items() if isinstance(values, dict) else ():
            if key not in _NOT_OF_A_STEP.get(section, ()):
                found[f"{section}.{key}"] = value
    return found


def hash_config(config: Mapping[str, JsonValue]) -> str:
    """Hash of step_values."""
    text = json.dumps(step_values(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def engine_facts(runner: StepRunner, loaded: LoadedConfig | None) -> EngineFacts:
    """Facts of a ready runner and the deployment that it was made from, if any."""
    config = None if loaded is None else config_values(loaded)
    return EngineFacts(
        versions=Versions(
            decodegrid=__version__,
            python=platform.python_version(),
            torch=_torch_version(),
            numpy=np.__version__,
        ),
        sizes=Sizes(
            num_draft_tokens=runner.num_draft_tokens,
            max_num_reqs=runner.max_num_reqs,
            max_model_len=runner.max_model_len,
            block_size=runner.block_size,
            num_blocks=runner.num_blocks,
            vocab_size=runner.vocab_size,
            prefill_chunk_sizes=runner.prefill_chunk_sizes,
        ),
        facts=dict(getattr(runner, "facts", {})),
        config=config,
        config_hash=None if config is None else hash_config(config),
    )


def _torch_version() -> str:
    # The request side works without torch, and then there is no version to tell.
    import sys

    torch = sys.modules.get("torch")
    return "" if torch is None else str(torch.__version__)


class _Requests:
    """The requests of a dump, one entry for each stay on the device."""

    def __init__(self, with_token_ids: bool) -> None:
        self.with_token_ids = with_token_ids
        self._places: dict[tuple[int, int], int] = {}
        self._found: list[tuple[Request, list[int]]] = []

    def place(self, request: Request, num_preemptions: int, blocks: list[int]) -> int:
        key = (id(request), num_preemptions)
        if key not in self._places:
            self._places[key] = len(self._found)
            self._found.append((request, blocks))
        return self._places[key]

    def facts(self) -> tuple[RequestFacts, ...]:
        return tuple(self._facts_of(request, blocks) for request, blocks in self._found)

    def _facts_of(self, request: Request, blocks: list[int]) -> RequestFacts:
        row = request.slot_request()
        return RequestFacts(
            max_seq_len=row.max_seq_len,
            temperature=row.temperature,
            top_p=row.top_p,
            top_k=row.top_k,
            min_p=row.min_p,
            seed=row.seed,
            stop_token_ids=row.stop_token_ids,
            max_drafts=row.max_drafts,
            rich=None if row.rich is None else _rich_facts(row.rich),
            num_prompt_tokens=request.num_prompt_tokens,
            num_tokens=row.seq_len,
            block_ids=tuple(blocks),
            token_ids=tuple(request.token_ids[: row.seq_len]) if self.with_token_ids else None,
        )


def _rich_facts(rich: RichRequest) -> RichFacts:
    return RichFacts(
        logit_bias=dict(rich.logit_bias),
        presence_penalty=rich.presence_penalty,
        frequency_penalty=rich.frequency_penalty,
        repetition_penalty=rich.repetition_penalty,
        min_seq_len=rich.min_seq_len,
        banned_before=rich.banned_before,
        num_top_logprobs=rich.num_top_logprobs,
        has_grammar=rich.has_grammar,
    )


def _length(record: DecodeRecord, row: int, before: list[DecodeRecord]) -> int | None:
    """Committed length that a row of a step started from; None where that is not known yet.

    before: the ring's decode steps before it, newest first.
    """
    length = record.seq_lens[row]
    if record.ended is not None:
        return length
    # Of the launch: what was on its way then is not in it.
    request, stay = record.requests[row], record.num_preemptions[row]
    for step in before:
        if step.ended is not None and step.ended < record.began:
            break
        if request not in step.requests:
            continue
        place = step.requests.index(request)
        if step.num_preemptions[place] != stay:
            continue
        if step.result is None:
            return None
        length += int(step.result.num_emitted[place])
    return length


def _drafted_by(
    record: DecodeRecord, row: int, before: list[DecodeRecord]
) -> tuple[StepResult, int] | None:
    """The result, and the row of it, with the drafts of a row; None where the ring has none."""
    if record.fresh[row]:
        return None
    request, stay = record.requests[row], record.num_preemptions[row]
    for step in before:
        if request in step.requests:
            place = step.requests.index(request)
            known = step.result is not None and step.num_preemptions[place] == stay
            return (step.result, place) if known and step.result is not None else None
    return None


def _row_facts(
    record: DecodeRecord, row: int, before: list[DecodeRecord], requests: _Requests
) -> RowFacts:
    result, ids = record.result, requests.with_token_ids
    length = _length(record, row, before)
    drafted = _drafted_by(record, row, before)
    drafts, confidence = None, None
    if drafted is not None:
        made, place = drafted
        drafts = tuple(made.drafts[place].tolist())
        confidence = tuple(made.confidence[place].tolist())
    emitted = None if result is None else int(result.num_emitted[row])
    return RowFacts(
        request=requests.place(
            record.requests[row], record.num_preemptions[row], record.block_lists[row]
        ),
        slot=record.slots[row],
        seq_len=record.seq_lens[row] if length is None else length,
        num_blocks=record.num_blocks[row],
        fresh=record.fresh[row],
        confidence=confidence,
        drafts=drafts if ids else None,
        num_emitted=emitted,
        num_verified=None if result is None else int(result.num_verified[row]),
        new_confidence=None if result is None else tuple(result.confidence[row].tolist()),
        token_ids=tuple(result.token_ids[row, : max(emitted or 0, 0)].tolist())
        if result is not None and ids
        else None,
    )


def _decode_facts(
    record: DecodeRecord,
    key: Key | None,
    before: list[DecodeRecord],
    requests: _Requests,
    now: float,
) -> DecodeFacts:
    """before: the ring's decode steps before it, newest first."""
    rows = range(len(record.requests))
    is_rich = any(request.slot_request().rich is not None for request in record.requests)
    return DecodeFacts(
        index=record.index,
        age_s=now - record.began,
        seconds=None if record.ended is None else record.ended - record.began,
        num_query_tokens=record.num_query_tokens,
        key=key,
        variant="rich" if is_rich else "fused",
        is_exact=all(_length(record, row, before) is not None for row in rows),
        rows=tuple(_row_facts(record, row, before, requests) for row in rows),
    )


def make_dump(
    ring: StepRing,
    engine: EngineFacts,
    *,
    reason: Reason,
    message: str,
    step: int | None,
    with_token_ids: bool,
    keys: Mapping[int, Key],
) -> Dump:
    """The whole ring as a dump about one step of it.

    keys: captured pairs by step index; a step that is not there has none in the dump.
    """
    now, requests = perf_counter(), _Requests(with_token_ids)
    steps: list[DecodeFacts | ChunkFacts] = []
    before: list[DecodeRecord] = []
    for record in ring.records():
        if isinstance(record, ChunkRecord):
            steps.append(_chunk_facts(record, requests, now))
        else:
            steps.append(_decode_facts(record, keys.get(record.index), before, requests, now))
            before.insert(0, record)
    return Dump(
        reason=reason,
        message=message,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        step=step,
        versions=engine.versions,
        config=engine.config,
        config_hash=engine.config_hash,
        facts=dict(engine.facts),
        sizes=engine.sizes,
        has_token_ids=with_token_ids,
        requests=requests.facts(),
        steps=tuple(steps),
    )


def _chunk_facts(record: ChunkRecord, requests: _Requests, now: float) -> ChunkFacts:
    return ChunkFacts(
        index=record.index,
        age_s=now - record.began,
        seconds=None if record.ended is None else record.ended - record.began,
        request=requests.place(record.request, record.num_preemptions, record.block_ids),
        slot=record.slot,
        start=record.start,
        num_tokens=record.num_tokens,
        num_blocks=record.num_blocks,
    )
