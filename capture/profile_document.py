"""What a profile says, as one document: the form of `profile.json` and of a package's ledger.

Owns the fields, their units and the way to and from JSON. Measures nothing. Data flow: the engine
fills a `Profile`; tables, CSV, the report page and a package are made from it alone.
"""

import json
from pathlib import Path
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)

from decodegrid.capture.grid import GraphKey
from decodegrid.capture.surface import Surface, SurfaceError, SurfacePoint
from decodegrid.configs.file_errors import first_problem
from decodegrid.configs.strict_json import read_json

WRITTEN_BY = "decodegrid profile --json"
MAX_FILE_BYTES = 64 * 2**20


class ProfileError(ValueError):
    """A file that is not a profile; names it and the field."""


class Part(BaseModel):
    """Base of the document's parts: unknown fields and other types are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class PhaseLine(Part):
    """One line of the start-up's phase table."""

    name: str
    count: NonNegativeInt
    seconds: float


class Timing(Part):
    """Times over repeats, ms."""

    median_ms: NonNegativeFloat
    low_ms: NonNegativeFloat
    high_ms: NonNegativeFloat
    repeats: PositiveInt


class SurfacePair(Timing):
    """Time of one captured pair."""

    num_reqs: PositiveInt
    num_query_tokens: PositiveInt


class ContextSurface(Part):
    """The step-time surface at one context length."""

    context_len: NonNegativeInt
    measured_at: float
    """Seconds since 1970."""
    pairs: list[SurfacePair]

    def surface(self) -> Surface:
        """As the verify budget takes it."""
        points = {
            GraphKey(pair.num_reqs, pair.num_query_tokens): SurfacePoint(
                pair.median_ms, pair.low_ms, pair.high_ms, pair.repeats
            )
            for pair in self.pairs
        }
        return Surface(points, self.context_len, self.measured_at, {})


class PrefillTime(Timing):
    """Time of one captured prefill chunk, full of tokens."""

    num_tokens: PositiveInt
    context_len: NonNegativeInt
    """Tokens of the text before the chunk."""


class GraphEntry(Part):
    """The ledger's line of one captured graph."""

    graph: str
    """As the capture names it, for example "(1, 6) fused" or "prefill 64"."""
    variant: Literal["fused", "rich", "prefill", "prompt logprobs"]
    num_reqs: NonNegativeInt
    """0 for prefill."""
    num_query_tokens: PositiveInt
    """Tokens of the chunk for prefill."""
    capture_s: NonNegativeFloat
    """Without regions that were compiled or loaded on the way."""
    num_nodes: NonNegativeInt
    nodes_by_kind: dict[str, int]
    """CPU: region, opaque. CUDA: kernel, memcpy, memset and so on, as cuda-python names them."""
    kernels: dict[str, int]
    """Calls a replay by kernel name; CPU: the kernels and extern calls of the generated code."""
    pool_bytes: NonNegativeInt
    """What the capture added to the allocator's pool."""
    unseen_bytes: NonNegativeInt
    """What the process (CPU) or the card (CUDA) grew by beside that while it was captured, the
    regions that were loaded on the way included."""
    replay_ms: NonNegativeFloat | None
    """Median; None where the graph was not timed."""
    bytes_moved: NonNegativeInt | None
    """Bytes that a full replay must read and write at least: each weight once, of experts and
    tables what its tokens touch, of state the live length; no activations."""
    flops: NonNegativeInt | None
    """Floating-point operations of its matrix products, counted from their shapes and live lengths;
    a multiply-add is two."""
    roofline_ms: NonNegativeFloat | None
    """The longer of bytes over the measured bandwidth and flops over the measured peak."""


class RegionEntry(Part):
    """The ledger's line of one compiled region."""

    region: str
    variants: NonNegativeInt
    compile_s: NonNegativeFloat
    """0 where all its variants came from a cache."""
    num_loaded: NonNegativeInt
    kernels: list[str]


class Peaks(Part):
    """What the machine reached in the same run."""

    read_bytes_per_s: float
    flops_per_s: float
    num_threads: PositiveInt


class PositionCounts(Part):
    """Drafts by position 1..K: drafted, offered, verified, accepted, and of the verified those
    whose predecessors were all accepted."""

    drafted: list[NonNegativeInt]
    offered: list[NonNegativeInt]
    verified: list[NonNegativeInt]
    accepted: list[NonNegativeInt]
    reached: list[NonNegativeInt]


class GraphHits(Part):
    """How often a live run replayed a pair, and what of it was padding."""

    num_reqs: PositiveInt
    num_query_tokens: PositiveInt
    replays: NonNegativeInt
    pad_rows: NonNegativeInt
    surplus_tokens: NonNegativeInt


class LiveRun(Part):
    """What a real run through the engine counted."""

    num_requests: NonNegativeInt
    num_decode_steps: NonNegativeInt
    num_emitted: NonNegativeInt
    decode_seconds: NonNegativeFloat
    graph_seconds: NonNegativeFloat
    pad_row_share: NonNegativeFloat
    surplus_token_share: NonNegativeFloat
    positions: PositionCounts
    hits: list[GraphHits]


class Profile(Part):
    """The whole document."""

    format: Literal[1] = 1
    command: list[str]
    measured_at: float
    """Seconds since 1970."""
    machine: dict[str, str]
    """Processor, cores, threads."""
    versions: dict[str, str]
    config_sha256: str
    max_num_reqs: PositiveInt
    num_draft_tokens: NonNegativeInt
    num_compilations: NonNegativeInt
    num_loaded: NonNegativeInt
    num_captured: NonNegativeInt
    start_up: list[PhaseLine]
    surfaces: list[ContextSurface] = Field(min_length=1)
    """The deployment's context first, where it was measured."""
    prefill: list[PrefillTime]
    graphs: list[GraphEntry]
    regions: list[RegionEntry]
    peaks: Peaks | None
    live: LiveRun | None
    """None without a live run."""


def profile_text(profile: Profile) -> str:
    """The document as JSON text with a line end."""
    return json.dumps(profile.model_dump(), indent=1, allow_nan=False) + "\n"


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises ProfileError for its content, OSError for the file."""
    try:
        data = read_json(path, MAX_FILE_BYTES)
        profile = Profile.model_validate(data)
        for surface in profile.surfaces:
            surface.surface()
    except ValidationError as error:
        raise ProfileError(f"{path}: {first_problem(error, written_by=WRITTEN_BY)}") from error
    except (SurfaceError, ValueError) as error:
        raise ProfileError(f"{path}: {error}") from error
    return profile
