"""What lowering makes of a kernel: CUDA source and the facts of a launch, as plain values.

Owns two records and their form as JSON; imports no TileLang, so that what was kept can be read
without it.

Data flow: `lower` -> `Lowered` -> OUT/lowered/*.json -> the manifest.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch needs, in plain values."""

    entry: str
    """Name of the function, unique among all kernels: several share a cubin."""
    tensors: list[dict[str, Any]]
    """name, dtype and shape of each tensor in call order; a shape has numbers and size names."""
    arguments: list[str]
    """What the function takes, in order: names of tensors (their pointers) and of sizes (int32)."""
    grid: list[str]
    """Three expressions in the size names, Python integer arithmetic."""
    block: list[int]
    shared_bytes: int
    """Dynamic shared memory."""

    def as_json(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Lowered:
    """One kernel for one architecture, before nvcc."""

    source: str
    launch: Launch

    def as_json(self) -> dict[str, Any]:
        """Plain values, which `from_json` reads."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Lowered":
        """What `as_json` gave."""
        return Lowered(value["source"], Launch(**value["launch"]))
