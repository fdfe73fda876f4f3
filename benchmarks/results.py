"""The benchmark's result as JSON: which keys it must have, and how a table line is printed.

Owns the schema that scripts read; measures nothing.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.timing import Spread

SCHEMA: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "eager_over_grid": ("1x1", "1x6", "8x8", "8x48"),
        "draft_gain": ("structured_b1", "stories_b1", "structured_b8", "stories_b8"),
        "scheduler_us_per_step": ("b1", "b8"),
        "capture_s": (),
        "peak_rss_mib": (),
        "compilations_after_ready": (),
    }
)
"""Required keys; those with names below them are objects with exactly these names, the others are
numbers. A result may have more top-level keys."""


def check_result(result: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first required key that is missing or has another shape."""
    for key, names in SCHEMA.items():
        if key not in result:
            raise ValueError(f"the result has no {key}")
        value = result[key]
        if names and (not isinstance(value, Mapping) or tuple(value) != names):
            raise ValueError(f"{key} must have exactly {', '.join(names)}, got {value!r}")
        for number in value.values() if names else (value,):
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise ValueError(f"{key} must hold numbers, got {number!r}")


def write_result(result: Mapping[str, Any], path: Path) -> None:
    """Check and write; the same errors as check_result, and OSError for the file."""
    check_result(result)
    save_json(result, path)


def save_json(result: Mapping[str, Any], path: Path | None) -> None:
    """Write a result; None writes nothing. Raises ValueError for NaN and infinity, OSError."""
    if path is not None:
        text = json.dumps(result, indent=1, allow_nan=False) + "\n"
        path.write_text(text, encoding="utf-8")


def format_rows(rows: Iterable[tuple[str, Spread, str]]) -> str:
    """One line a row: name, min / median / max, unit."""
    return "\n".join(f"  {name:<34} {spread!s:>30} {unit}" for name, spread, unit in rows)
