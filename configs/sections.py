"""The sections of a deployment: their fields, types and bounds.

Owns what each key may say alone; the rules between sections and the numbers that follow from them
stand in configs/schema.py. Reads no file and no environment.
"""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from decodegrid.configs.byte_size import NumBytes
from decodegrid.configs.cross_field import CrossFieldError


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _check_verify_tokens(value: object) -> object:
    """One message for the union, where pydantic would report each of its branches."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value not in ("scheduled", "all") and not is_count:
        raise ValueError('must be "scheduled", "all" or a whole number >= 1')
    return value


def _check_auto_switch(value: object) -> object:
    """One message for the union, as above."""
    if value != "auto" and not isinstance(value, bool):
        raise ValueError('must be true, false or "auto"')
    return value


def _ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    for left, right in pairwise(values):
        if left >= right:
            raise ValueError(f"must be ascending without repeats; {right} follows {left}")
    return values


def _as_pairs(value: object) -> object:
    """Lists of lists as tuples; one message for every other form."""
    if not isinstance(value, list | tuple):
        return value
    if not all(isinstance(item, list | tuple) and len(item) == 2 for item in value):
        raise ValueError("must be a list of [requests, query tokens] pairs")
    return tuple(tuple(item) for item in value)


def _ascending_pairs(values: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    for left, right in pairwise(values):
        if left >= right:
            raise ValueError(
                f"must be ascending without repeats; {list(right)} follows {list(left)}"
            )
    return values


ChunkSizes = Annotated[
    tuple[Annotated[int, Field(ge=2, le=65536)], ...],
    BeforeValidator(_as_tuple),
    AfterValidator(_ascending),
    Field(min_length=1),
]
GridSizes = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    BeforeValidator(_as_tuple),
    AfterValidator(_ascending),
]
_PairSize = Annotated[int, Field(ge=1)]
GridPairs = Annotated[
    tuple[tuple[_PairSize, _PairSize], ...],
    BeforeValidator(_as_pairs),
    AfterValidator(_ascending_pairs),
]
DraftTemperatures = Annotated[
    tuple[Annotated[float, Field(gt=0.0)], ...], BeforeValidator(_as_tuple)
]


class Section(BaseModel):
    """What all sections share: no coercion, no change after load, no unknown key."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class ModelSection(Section):
    """The checkpoint, and where and how it computes."""

    checkpoint: Annotated[str, Field(min_length=1)] = "tiny"
    """"tiny" for the embedded model, "tiny-v41" for its quantised form, else a checkpoint
    directory, relative to the YAML file."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device of weights, state and steps."""

    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of weights and activations; what must be wider stays wider."""

    num_threads: Annotated[int, Field(ge=1, le=256)] = 1
    """CPU threads of one step, 1 to 256."""

    weights: Literal["auto", "expanded", "packed_experts", "packed"] = "auto"
    """How the weights of a quantised checkpoint stand in memory. "expanded": in `dtype`.
    "packed_experts": the routed experts as stored, expanded where a token visits them. "packed":
    every quantised weight as stored. "auto": expanded on the CPU, packed on CUDA. A checkpoint of
    floats has nothing to pack: it takes "auto" and "expanded" only."""

    engram_tables: Literal["memory", "mapped"] = "memory"
    """"memory": Engram tables are read at start. "mapped": they stay in the checkpoint's files,
    from which the system reads the rows that are looked up; on the CPU only."""


class SchedulerSection(Section):
    """Admission, prefill chunks and their order."""

    max_num_reqs: Annotated[int, Field(ge=1, le=1024)] = 8
    """Most requests that decode at once, 1 to 1024; as many slots are allocated."""

    max_model_len: Annotated[int, Field(ge=2, le=1048576)] = 4096
    """Most tokens of one request, prompt and output together, 2 to 1048576."""

    prefill_chunk_sizes: ChunkSizes = (16, 64, 256)
    """Captured prefill sizes in tokens, ascending, each 2 to 65536; a chunk is padded upwards."""

    decode_steps_per_prefill_chunk: Annotated[int, Field(ge=0, le=1000)] = 4
    """A waiting prompt gets a chunk at least every so many decode steps, 0 to 1000; with 0 decoding
    waits until no prompt with a free slot is left."""

    engine_type: Literal["normal", "prompt", "completion"] = "normal"
    """"normal": prefill and decode. "prompt": only computes prompts and hands their state over.
    "completion": only decodes, from states handed over; a request waits until there are blocks for
    its full length."""

    async_scheduling: Annotated[bool | Literal["auto"], BeforeValidator(_check_auto_switch)] = (
        "auto"
    )
    """Whether a decode step is launched before the results of the last one are looked at, so that
    the host's work is hidden behind the device's. The text is the same either way. A request's end
    is seen one step late, which costs its row in that step. "auto": on CUDA. On the CPU a launch
    returns when its step has run, which leaves nothing to hide behind."""


class PrefillSection(Section):
    """What a prefill computes of the decoder, the layers from the first of ratio 1 on."""

    bounded_replay: Literal["off", "mask", "compact"] = "off"
    """"off": all of it. "compact": only the last `keep_tokens` of a text, whose windows begin
    there; outputs differ from an exact prefill's. "mask": the same outputs without leaving rows
    out, to compare with. The last two serve no prompt_logprobs."""

    keep_tokens: Annotated[int, Field(ge=0, le=1048576)] = 0
    """Tokens that a bounded replay keeps, at least the model's window + num_draft_tokens + 1; 0
    where it is off."""


class CacheSection(Section):
    """The paged pool of compressed entries and index keys, and the records in it and in the rings.

    At most one of `num_blocks`, `pool_bytes` and `memory_fraction` is set.
    """

    kv_cache: Literal["compute", "v41"] = "compute"
    """How keys are stored. "compute": in the model's dtype. "v41": the released model's records,
    MXFP8 for the window, FP4 for compressed entries and index keys; index queries are rounded
    to FP4 as well."""

    block_size: Annotated[int, Field(ge=2, le=1024)] = 64
    """Tokens of text that one block covers, even, 2 to 1024."""

    num_blocks: Annotated[int, Field(ge=0, le=2**24)] = 0
    """Blocks in the pool with the null block, 2 to 16777216; 0 for as many as `max_num_reqs`
    requests of `max_model_len` tokens need."""

    pool_bytes: Annotated[NumBytes, Field(ge=0, le=2**50)] = 0
    """Most bytes of the pool, as a number or with a unit ("512MiB"); 0 for no such limit."""

    memory_fraction: Annotated[float, Field(ge=0.0, le=0.95)] = 0.0
    """Share of the memory that is free once the weights are loaded to give to the pool, up to 0.95;
    0 for no such limit."""

    prefix_cache: Literal["on", "off"] = "on"
    """"on": what a request computed serves later ones that begin with the same tokens, for as long
    as its blocks are not needed. "off": every request is computed from its first token."""

    prefix_snapshots: Annotated[int, Field(ge=1, le=65536)] = 64
    """Windows kept for the prefix cache, 1 to 65536, each of all layers; a request resumes where
    one of them ended."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        given = [
            f"cache.{name} = {getattr(self, name)}"
            for name in ("num_blocks", "pool_bytes", "memory_fraction")
            if getattr(self, name)
        ]
        if len(given) > 1:
            message = f"the pool has one size, got {' and '.join(given)}"
            raise CrossFieldError(((given[-1].split()[0].removeprefix("cache."), message),))
        return self

    @field_validator("block_size")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value

    @field_validator("num_blocks")
    @classmethod
    def _room_beside_null_block(cls, value: int) -> int:
        if value == 1:
            raise ValueError("must be 0 (sized by need) or at least 2 (block 0 is the null block)")
        return value


class ConfidenceTemperatures(Section):
    """Divisors of the confidence head's logits, one for each draft, above 0; below 1e-5 they act
    as 1e-5. How often a draft is accepted depends on how it is verified, so each way has its own.
    """

    coupled: DraftTemperatures = ()
    """K or more numbers for `verify: coupled`, the first K count; empty: the checkpoint's own, or
    1.0 each."""

    rejection: DraftTemperatures = ()
    """As `coupled`, for `verify: rejection`."""


class SpeculationSection(Section):
    """Drafts and their verification."""

    num_draft_tokens: Annotated[int, Field(ge=0, le=16)] = 5
    """Drafts offered for each request and step, K, 0 to 16; 0 decodes without a drafter."""

    verify_tokens: Annotated[
        Literal["scheduled", "all"] | Annotated[int, Field(ge=1)],
        BeforeValidator(_check_verify_tokens),
    ] = "scheduled"
    """Query tokens of one step over all its requests. "scheduled": as many as the measured step
    times and the drafts' survival rates say emit most tokens a millisecond. "all": every draft. A
    number: at most so many, 1 to max_num_reqs * (K + 1); each request keeps its one token."""

    budget_rates: Literal["delayed", "fresh"] = "delayed"
    """Survival rates that a scheduled total comes from. "delayed": of the step before last, which
    keeps rejection sampling exact. "fresh": of the last step, for `verify: coupled` without
    `async_scheduling` only."""

    verify: Literal["coupled", "rejection"] = "coupled"
    """"coupled": drafter and target draw with the same noise, and what is emitted does not depend
    on drafts, batch or budget. "rejection": a draft is kept as often as the distributions allow;
    it keeps K * vocabulary numbers for each request. Temperature 0 gives the same text in both."""

    confidence_temperatures: ConfidenceTemperatures = ConfidenceTemperatures()
    """Calibration of the drafter's confidences for each way to verify; empty: the checkpoint's."""

    def draft_temperatures(self, calibrated: tuple[float, ...] = ()) -> tuple[float, ...]:
        """The K divisors of the chosen way to verify: those of the deployment, else those that the
        checkpoint was calibrated to, else 1; never below the floor."""
        given: tuple[float, ...] = getattr(self.confidence_temperatures, self.verify)
        found = (given or calibrated)[: self.num_draft_tokens] or (1.0,) * self.num_draft_tokens
        return tuple(max(value, 1e-5) for value in found)


class SurfaceSection(Section):
    """How the step times of the captured pairs are measured for the verify budget."""

    context_len: Annotated[int, Field(ge=1)] = 256
    """Tokens in each row's context while measuring, at least 1; as many as fit the length limit."""

    repeats: Annotated[int, Field(ge=0, le=1000)] = 9
    """Timed replays of each pair at start-up, 0 to 1000; 0 takes a kept surface or none."""

    max_age_s: Annotated[int, Field(ge=0, le=315360000)] = 86400
    """Seconds for which a kept surface serves later starts, 0 to 315360000 (ten years)."""


class GridSection(Section):
    """Which (B requests, Q query tokens) pairs are captured: `pairs`, or for each B of `num_reqs`
    the Q that are B times each entry of the other list."""

    num_reqs: GridSizes = ()
    """Captured B, ascending, the last one `max_num_reqs`; empty for the powers of two below
    `max_num_reqs`, and `max_num_reqs`."""

    num_query_tokens_per_req: GridSizes = ()
    """Captured Q / B, ascending, the last one K + 1; empty for 1 to K + 1."""

    pairs: GridPairs = ()
    """Instead of the two lists: every captured [B, Q], ascending, the last one [max_num_reqs,
    max_num_reqs * (K + 1)]; `decodegrid plan` writes it. Empty for the two lists."""

    rich: bool = True
    """Whether every pair is captured a second time, in the variant that requests with penalties,
    logit bias, min_tokens, logprobs or a grammar run in; without it they are refused."""


class CompileSection(Section):
    """How the regions of a step are compiled."""

    backend: Literal["inductor", "eager"] = "inductor"
    """"inductor" for speed; "eager" traces without a code generator, for tests."""

    cache_dir: str = ""
    """Directory of compile caches, relative to the YAML file; empty for a per-user one."""

    package: str = ""
    """Directory of a package that `decodegrid capture` wrote, relative to the YAML file, to start
    from; empty for what the cache directory has."""

    cubins_dir: str = ""
    """Directory of CUDA kernels that were built beforehand, with a directory for each architecture,
    relative to the YAML file; empty for `cubins` in the cache directory."""

    progress: bool = True
    """Whether compilation and capture draw a progress bar on standard error."""
