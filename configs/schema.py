"""The schema of a deployment: its sections together, and the rules between fields.

Owns what a deployment may say and the numbers that follow from it; the sections and their bounds
stand in configs/sections.py. Does not own files, line numbers or overrides (configs/load.py) and
reads no environment. Data flow: configs/load.py turns YAML into a plain mapping, this schema checks
it, every other folder reads the frozen result.
"""

from typing import Annotated, Self

from pydantic import BeforeValidator, model_validator

from decodegrid.configs.cross_field import CrossFieldError
from decodegrid.configs.dump_section import DumpSection
from decodegrid.configs.grammar_section import StructuredOutputsSection
from decodegrid.configs.parallel_section import ParallelSection
from decodegrid.configs.sampling_section import SamplingSection
from decodegrid.configs.sections import (
    CacheSection,
    CompileSection,
    ConfidenceTemperatures,
    GridSection,
    ModelSection,
    PrefillSection,
    SchedulerSection,
    Section,
    SpeculationSection,
    SurfaceSection,
)
from decodegrid.configs.server_section import ServerSection

SCHEMA_VERSION = 1
"""The version of the schema that this version of the program reads, and no other."""


def _check_schema_version(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a whole number")
    if value != SCHEMA_VERSION:
        later = "; a file of a later one needs a later decodegrid" if value > SCHEMA_VERSION else ""
        raise ValueError(
            f"must be {SCHEMA_VERSION}, the only version of the schema that this decodegrid reads"
            f"{later}"
        )
    return value


class DeploymentConfig(Section):
    """One deployment. Raises pydantic.ValidationError; configs/load.py adds file and line."""

    schema_version: Annotated[int, BeforeValidator(_check_schema_version)] = SCHEMA_VERSION
    """Version of the schema that the file is written for, 1; one that is not given is 1."""

    model: ModelSection = ModelSection()
    parallel: ParallelSection = ParallelSection()
    scheduler: SchedulerSection = SchedulerSection()
    prefill: PrefillSection = PrefillSection()
    cache: CacheSection = CacheSection()
    speculation: SpeculationSection = SpeculationSection()
    surface: SurfaceSection = SurfaceSection()
    grid: GridSection = GridSection()
    compile: CompileSection = CompileSection()
    sampling: SamplingSection = SamplingSection()
    dumps: DumpSection = DumpSection()
    structured_outputs: StructuredOutputsSection = StructuredOutputsSection()
    server: ServerSection = ServerSection()

    @property
    def max_query_tokens_per_req(self) -> int:
        """K + 1: the drafts of a request and the token before them."""
        return self.speculation.num_draft_tokens + 1

    @property
    def max_num_query_tokens(self) -> int:
        """Query tokens of the largest pair, max_num_reqs * (K + 1)."""
        return self.scheduler.max_num_reqs * self.max_query_tokens_per_req

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included, with 0 resolved."""
        if self.cache.num_blocks:
            return self.cache.num_blocks
        per_request = -(-self.scheduler.max_model_len // self.cache.block_size)
        return self.scheduler.max_num_reqs * per_request + 1

    @property
    def grid_num_reqs(self) -> tuple[int, ...]:
        """Captured numbers of requests B, ascending, with the empty list resolved."""
        largest = self.scheduler.max_num_reqs
        powers = tuple(1 << i for i in range(largest.bit_length()) if 1 << i < largest)
        return self.grid.num_reqs or (*powers, largest)

    @property
    def grid_num_query_tokens_per_req(self) -> tuple[int, ...]:
        """Captured query tokens for each request, ascending, with the empty list resolved."""
        return self.grid.num_query_tokens_per_req or tuple(
            range(1, self.max_query_tokens_per_req + 1)
        )

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        problems = []
        reqs, per_req = self.grid.num_reqs, self.grid.num_query_tokens_per_req
        max_num_reqs, drafts = self.scheduler.max_num_reqs, self.speculation.num_draft_tokens
        if reqs and reqs[-1] != max_num_reqs:
            problems.append(
                (
                    "grid.num_reqs",
                    f"must end with scheduler.max_num_reqs = {max_num_reqs}, so that the "
                    f"largest batch has a graph, got {list(reqs)}",
                )
            )
        if per_req and per_req[-1] != drafts + 1:
            problems.append(
                (
                    "grid.num_query_tokens_per_req",
                    f"must end with {drafts + 1}, speculation.num_draft_tokens = {drafts} plus "
                    f"one, so that the largest batch has a graph, got {list(per_req)}",
                )
            )
        problems += self._pair_problems()
        verify = self.speculation.verify_tokens
        if isinstance(verify, int) and verify > self.max_num_query_tokens:
            problems.append(
                (
                    "speculation.verify_tokens",
                    f"must be at most {self.max_num_query_tokens}, scheduler.max_num_reqs = "
                    f"{max_num_reqs} times (speculation.num_draft_tokens = {drafts} plus one), "
                    f"got {verify}",
                )
            )
        if self.speculation.verify == "rejection" and self.speculation.budget_rates == "fresh":
            problems.append(
                (
                    "speculation.budget_rates",
                    'must be "delayed" with speculation.verify = rejection, whose distribution '
                    'the newest rates would change, got "fresh"',
                )
            )
        elif self.speculation.budget_rates == "fresh" and self.has_step_in_flight:
            problems.append(
                (
                    "speculation.budget_rates",
                    f'must be "delayed" with scheduler.async_scheduling = '
                    f"{str(self.scheduler.async_scheduling).lower()} on {self.model.device}, where "
                    'no newer rates are known when a step is scheduled, got "fresh"',
                )
            )
        for mode in ConfidenceTemperatures.model_fields:
            given = getattr(self.speculation.confidence_temperatures, mode)
            if given and len(given) < drafts:
                problems.append(
                    (
                        f"speculation.confidence_temperatures.{mode}",
                        f"must be empty or have speculation.num_draft_tokens = {drafts} or more, "
                        f"got {len(given)}",
                    )
                )
        problems += self._device_problems()
        if problems:
            raise CrossFieldError(tuple(problems))
        return self

    def _device_problems(self) -> list[tuple[str, str]]:
        """What `model.device` rules out, as (key, message)."""
        problems, device, expert = [], self.model.device, self.parallel.expert
        if expert > 1 and device != "cuda":
            problems.append(
                ("parallel.expert", f"must be 1 with model.device = {device}, got {expert}")
            )
        if self.model.engram_tables == "mapped" and device != "cpu":
            problems.append(
                (
                    "model.engram_tables",
                    f'must be "memory" with model.device = {device}, whose steps cannot read the '
                    'checkpoint\'s files, got "mapped"',
                )
            )
        if self.prefill.keep_tokens and self.prefill.bounded_replay == "off":
            problems.append(
                (
                    "prefill.keep_tokens",
                    "must be 0 with prefill.bounded_replay = off, which keeps every token, got "
                    f"{self.prefill.keep_tokens}",
                )
            )
        return problems

    @property
    def has_step_in_flight(self) -> bool:
        """`scheduler.async_scheduling`, with "auto" decided."""
        asked = self.scheduler.async_scheduling
        return self.model.device == "cuda" if asked == "auto" else asked

    def _pair_problems(self) -> list[tuple[str, str]]:
        """What is wrong with `grid.pairs`, as (key, message); the first pair that does not fit."""
        key, pairs = "grid.pairs", self.grid.pairs
        if not pairs:
            return []
        for other in ("num_reqs", "num_query_tokens_per_req"):
            if getattr(self.grid, other):
                message = f"must be empty with grid.pairs, got {list(getattr(self.grid, other))}"
                return [(f"grid.{other}", message)]
        most, per_req = self.scheduler.max_num_reqs, self.max_query_tokens_per_req
        drafts = self.speculation.num_draft_tokens
        limits = f"scheduler.max_num_reqs = {most} and speculation.num_draft_tokens = {drafts}"
        for num_reqs, num_tokens in pairs:
            if not (num_reqs <= most and num_reqs <= num_tokens <= num_reqs * per_req):
                allowed = f"1..{most} requests, each with 1..{per_req} query tokens"
                pair = f"[{num_reqs}, {num_tokens}]"
                return [(key, f"must hold pairs of {allowed} ({limits}), got {pair}")]
        largest = (most, self.max_num_query_tokens)
        if pairs[-1] != largest:
            message = f"must end with {list(largest)} ({limits}), so that the largest batch has a"
            return [(key, f"{message} graph, got {list(pairs[-1])}")]
        return []
