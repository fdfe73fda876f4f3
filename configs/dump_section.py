"""The `dumps` section of a deployment: what is kept of the last steps, and when it is written down.

Owns the names, bounds and defaults of its fields. Reads no file and no environment.
"""

from typing import Annotated

from pydantic import Field, field_validator

from decodegrid.configs.sections import Section


class DumpSection(Section):
    """What to do about a step that hangs, fails or returns what cannot be right."""

    directory: str = ""
    """Directory of dumps, relative to the YAML file; empty for `dumps` in the compile cache's."""

    num_steps: Annotated[int, Field(ge=0, le=1024)] = 16
    """Last decode steps, and as many chunks, that a dump tells of, 2 to 1024; 0 writes no dumps."""

    keep: Annotated[int, Field(ge=1, le=1000)] = 8
    """Dumps in the directory, 1 to 1000; a new one removes the oldest."""

    token_ids: bool = False
    """Whether dumps hold the token ids of prompts and outputs; without them a replay makes up
    ids."""

    watchdog_s: Annotated[float, Field(ge=0.0, le=86400.0)] = 120.0
    """Seconds without the end of a step after which a dump is written, up to 86400; 0 for never."""

    check_logits: bool = False
    """Whether every step's logits are looked at for NaN and infinity, which costs time; what a step
    returns is always checked."""

    @field_validator("num_steps")
    @classmethod
    def _step_and_its_drafts(cls, value: int) -> int:
        if value == 1:
            raise ValueError("must be 0 (no dumps) or at least 2 (a step and the one before it)")
        return value
