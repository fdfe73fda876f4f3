"""What a dump says: the schema of its content, checked when it is written and when it is read.

Owns names, types and bounds. Does not own the file (engine/replay_file.py), where the values come
from (engine/replay_record.py) or whether a runner can hold them (engine/replay_state.py). Token ids
of texts are absent unless the deployment asks for them; ids that parameters name (stop tokens, a
bias) are always there.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from decodegrid.engine.replay_file import DumpError, read_dump

Count = Annotated[int, Field(ge=0)]
Ids = tuple[Count, ...]


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants"
    )


class Versions(_Part):
    """Of what made the dump."""

    decodegrid: str
    python: str
    torch: str
    numpy: str


class Sizes(_Part):
    """The runner that the steps ran on."""

    num_draft_tokens: Count
    max_num_reqs: Count
    max_model_len: Count
    block_size: Annotated[int, Field(ge=1)]
    num_blocks: Count
    vocab_size: Annotated[int, Field(ge=1)]
    prefill_chunk_sizes: Ids


class Key(_Part):
    """The captured pair that ran a step."""

    num_reqs: Annotated[int, Field(ge=1)]
    num_query_tokens: Annotated[int, Field(ge=1)]


class RichFacts(_Part):
    """Of decodegrid.engine.runner_protocol.RichRequest what is no text."""

    logit_bias: dict[int, float]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    min_seq_len: Count
    banned_before: Ids
    num_top_logprobs: int
    has_grammar: bool


class RequestFacts(_Part):
    """One request in one stay on the device; a preempted one that came back is another."""

    max_seq_len: Count
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: Count
    stop_token_ids: Ids
    max_drafts: Count | None
    rich: RichFacts | None
    num_prompt_tokens: Count
    num_tokens: Count
    """Prompt and output, as the dump was made."""
    block_ids: Ids
    token_ids: Ids | None
    """All num_tokens ids; None where token ids were not asked for."""


class RowFacts(_Part):
    """One row of a decode step."""

    request: Count
    """Place in the dump's requests."""
    slot: Annotated[int, Field(ge=1)]
    seq_len: Annotated[int, Field(ge=1)]
    """Committed length that the step started from."""
    num_blocks: Annotated[int, Field(ge=1)]
    fresh: bool
    """The step verified no draft of it."""
    confidence: tuple[float, ...] | None
    """Of the drafts that it brought into the step; None where no step of the ring made them."""
    drafts: tuple[int, ...] | None
    """Those drafts; None also where token ids were not asked for."""
    num_emitted: int | None
    """What the step emitted for it; None where it did not end."""
    num_verified: int | None
    new_confidence: tuple[float, ...] | None
    token_ids: tuple[int, ...] | None
    """What it emitted; None also where token ids were not asked for."""


class DecodeFacts(_Part):
    """One decode step of the ring."""

    kind: Literal["decode"] = "decode"
    index: Count
    age_s: float
    """Seconds from its launch to the dump."""
    seconds: float | None
    """From launch to result; None where it did not end."""
    num_query_tokens: Annotated[int, Field(ge=1)]
    key: Key | None
    """None where the runner does not say which pair it would take."""
    variant: Literal["fused", "rich"]
    is_exact: bool
    """False where an earlier step was still on its way: lengths are those before that one."""
    rows: Annotated[tuple[RowFacts, ...], Field(min_length=1)]


class ChunkFacts(_Part):
    """One prefill chunk of the ring."""

    kind: Literal["prefill"] = "prefill"
    index: Count
    age_s: float
    seconds: float | None
    request: Count
    slot: Annotated[int, Field(ge=1)]
    start: Count
    num_tokens: Annotated[int, Field(ge=1)]
    num_blocks: Annotated[int, Field(ge=1)]


StepFacts = Annotated[DecodeFacts | ChunkFacts, Field(discriminator="kind")]


class Dump(_Part):
    """The content of a dump."""

    reason: Literal["fault", "crash", "stall"]
    """A result that cannot be right, an exception, or a step that did not end in time."""
    message: str
    made_at: str
    """UTC, ISO 8601."""
    step: Count | None
    """Index of the step that the reason is about; None where no step had been launched."""
    versions: Versions
    config: dict[str, JsonValue] | None
    """The deployment, with its paths resolved; None for a runner that was made without one."""
    config_hash: str | None
    facts: dict[str, str]
    """What the captured code depended on."""
    sizes: Sizes
    has_token_ids: bool
    requests: tuple[RequestFacts, ...]
    steps: tuple[StepFacts, ...]
    """Oldest first."""

    @model_validator(mode="after")
    def _refer_inside(self) -> Self:
        for step in self.steps:
            used = step.rows if isinstance(step, DecodeFacts) else (step,)
            for item in used:
                if item.request >= len(self.requests):
                    raise ValueError(f"step {step.index} names request {item.request}")
                if item.num_blocks > len(self.requests[item.request].block_ids):
                    raise ValueError(f"step {step.index} has blocks that no request has")
        return self

    def find_step(self, index: int | None) -> DecodeFacts | ChunkFacts:
        """The step of that index; None is the one that the dump is about. Raises DumpError."""
        wanted = self.step if index is None else index
        for step in self.steps:
            if step.index == wanted:
                return step
        if wanted is None:
            raise DumpError("the dump holds no step: nothing had been launched")
        indices = ", ".join(str(step.index) for step in self.steps) or "none"
        raise DumpError(f"step {wanted} is not in the dump; its steps are {indices}")


def load_dump(path: Path) -> Dump:
    """Read and check a dump. Raises DumpError, on one line."""
    try:
        return Dump.model_validate_json(read_dump(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "content"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise DumpError(f"{path}: {place}: {first['msg']}{more}") from error
