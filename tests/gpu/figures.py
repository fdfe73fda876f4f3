"""The arithmetic of what is printed: roofline, medians, one table. Pure; no device."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

PEAK_BYTES_PER_S = {"sm90": 4.8e12, "sm100": 8.0e12}
"""Memory of an H200 and of a B200, from their data sheets."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the closing table."""

    what: str
    result: str
    """"ok", "FAILED", "not run" or a figure."""
    note: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the run is to end with an error."""
        return self.result == "FAILED"


def visited_experts(tokens: int, top_k: int, num_experts: int) -> int:
    """Experts that a step reads at most."""
    return min(tokens * top_k, num_experts)


def least_seconds(num_bytes: float, peak: float) -> float:
    """Time in which memory alone delivers the bytes. Raises ValueError unless the peak is
    positive."""
    if peak <= 0:
        raise ValueError(f"a peak of {peak} bytes a second")
    return num_bytes / peak


def share_of_peak(num_bytes: float, seconds: float, peak: float) -> str:
    """ "42 % of 4.8 TB/s"."""
    return f"{least_seconds(num_bytes, peak) / seconds:.0%} of {peak / 1e12:.1f} TB/s"


def microseconds(samples: Sequence[float]) -> str:
    """Least and median of some seconds."""
    return f"{min(samples) * 1e6:.1f} / {median(samples) * 1e6:.1f} us"


def format_table(rows: Sequence[Row]) -> str:
    """Columns as wide as what stands in them; the last line counts."""
    widths = [max(len(getattr(row, name)) for row in rows) for name in ("what", "result")]
    lines = [f"{r.what:<{widths[0]}}  {r.result:<{widths[1]}}  {r.note}".rstrip() for r in rows]
    failed = sum(row.is_failure for row in rows)
    return "\n".join([*lines, f"{len(rows)} lines, {failed} failed"])


@dataclass(slots=True)
class Budget:
    """Seconds of a run, handed out to its parts."""

    total: float
    began: float

    def left(self, now: float) -> float:
        """Seconds that are left."""
        return self.total - (now - self.began)

    def allows(self, now: float, needed: float) -> bool:
        """Whether a part that takes about this long may still begin."""
        return self.left(now) >= needed
