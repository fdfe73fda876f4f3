"""What each captured pair costs beside its step time: memory, and time to capture.

Owns the numbers and their file. Measures nothing.

The file: {"format": 1, "pairs": [{"num_reqs": 8, "num_query_tokens": 48, "memory_bytes": 1048576,
"capture_s": 0.4}, ...]}, all variants of a pair together.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from decodegrid.capture.grid import GraphKey
from decodegrid.configs.file_errors import first_problem
from decodegrid.configs.strict_json import read_json

WRITTEN_BY = "decodegrid profile --costs"
MAX_FILE_BYTES = 64 * 2**20
MAX_MEMORY_BYTES = 2**60
MAX_CAPTURE_S = 1e9


class CostError(ValueError):
    """A file of costs that cannot be used."""


class _CostFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    num_reqs: int
    num_query_tokens: int
    memory_bytes: FiniteFloat = Field(ge=0, le=MAX_MEMORY_BYTES)
    capture_s: FiniteFloat = Field(ge=0, le=MAX_CAPTURE_S)


class _CostsFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    format: Literal[1]
    pairs: list[_CostFile] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class PairCost:
    """Costs of one pair, or of several together."""

    memory_bytes: float
    """What its graphs add to the memory of the others."""
    capture_s: float
    """Seconds to capture it."""


def total_cost(costs: Iterable[PairCost]) -> PairCost:
    """The sums."""
    items = list(costs)
    return PairCost(
        math.fsum(item.memory_bytes for item in items), math.fsum(item.capture_s for item in items)
    )


def read_costs(path: Path) -> dict[GraphKey, PairCost]:
    """Costs by pair.

    Raises:
        CostError: names the file and what of it is wrong.
        OSError: the file cannot be read.
    """
    try:
        file = _CostsFile.model_validate(read_json(path, MAX_FILE_BYTES))
    except ValidationError as error:
        raise CostError(f"{path}: {first_problem(error, written_by=WRITTEN_BY)}") from None
    except ValueError as error:
        raise CostError(f"{path}: {error}") from None
    found: dict[GraphKey, PairCost] = {}
    for index, item in enumerate(file.pairs):
        try:
            key = GraphKey(item.num_reqs, item.num_query_tokens)
        except ValueError as error:
            raise CostError(f"{path}: pairs.{index}: {error}") from None
        if key in found:
            raise CostError(f"{path}: pairs.{index}: {key} is there twice")
        found[key] = PairCost(item.memory_bytes, item.capture_s)
    return found
