"""Step-time surfaces on disk, one file for each set of facts, keys and context length.

Owns the files and the reasons why one does not serve. Does not measure
(`decodegrid.capture.surface`).
"""

import fnmatch
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from uuid import uuid4

from decodegrid.capture.fact_text import differing_parts
from decodegrid.capture.grid import GraphKey
from decodegrid.capture.surface import Surface, SurfaceError


class SurfaceStore:
    """Surfaces in a directory, one file for each set of facts, keys and context length.

    Touches only files named surface-*.json and its own temporary ones; other files are neither
    read nor removed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, surface: Surface) -> Path:
        """Write the surface, replacing an older one of equal facts, keys and context length.

        A reader sees the old file or the new one, never a part.

        Returns:
            The file.

        Raises:
            SurfaceError: names the path that could not be written.
        """
        path = self.directory / self._name(surface.points, surface.context_len, surface.facts)
        part = self.directory / f".{path.stem}.{uuid4().hex}.tmp"
        text = json.dumps(surface.as_json(), indent=1, allow_nan=False) + "\n"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                with part.open("x", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise SurfaceError(f"cannot write the step-time surface {path}: {error}") from error
        return path

    def load(
        self,
        keys: Iterable[GraphKey],
        *,
        context_len: int,
        facts: Mapping[str, str],
        max_age_s: float,
        now: float,
    ) -> tuple[Surface | None, str]:
        """The newest surface of exactly these keys, facts and context length, not over max_age_s.

        Damage, age and differences are reasons, not errors; of several files the reason tells of
        the one that comes closest.

        Args:
            now: seconds since 1970.

        Returns:
            The surface and "", or None and the reason.
        """
        wanted = frozenset(keys)
        found: list[Surface] = []
        misfits: list[tuple[float, float, str]] = []
        try:
            names = sorted(os.listdir(self.directory))
        except FileNotFoundError:
            names = []
        except OSError as error:
            return None, f"cannot read {self.directory}: {error}"
        for name in fnmatch.filter(names, "surface-*.json"):
            path = self.directory / name
            try:
                surface = Surface.from_json(json.loads(path.read_text("utf-8")), name)
            except (OSError, ValueError, RecursionError) as error:
                # Damage under the very name that was wanted says more than another's difference.
                rank = 0 if name == self._name(wanted, context_len, facts) else math.inf
                misfits.append((rank, 0.0, f"cannot use {path}: {error}"))
                continue
            age = surface.age(now)
            wrong = _differences(surface, wanted, context_len, facts)
            if not wrong and 0.0 <= age <= max_age_s:
                found.append(surface)
            elif wrong:
                misfits.append((len(wrong), age, f"{path}: {'; '.join(wrong)}"))
            else:
                limit = f"allowed are 0..{max_age_s:.0f} s"
                misfits.append((0, age, f"{path}: its age is {age:.0f} s, {limit}"))
        if found:
            return max(found, key=lambda surface: surface.measured_at), ""
        if misfits:
            return None, min(misfits)[2]
        return None, f"no surface has been saved in {self.directory}"

    @staticmethod
    def _name(keys: Iterable[GraphKey], context_len: int, facts: Mapping[str, str]) -> str:
        pairs = sorted((key.num_reqs, key.num_query_tokens) for key in keys)
        factors = json.dumps([1, dict(facts), pairs, context_len], sort_keys=True)
        return f"surface-{hashlib.sha256(factors.encode()).hexdigest()[:24]}.json"


def _differences(
    surface: Surface, keys: frozenset[GraphKey], context_len: int, facts: Mapping[str, str]
) -> list[str]:
    """What of a surface is not as wanted, one phrase each."""
    wrong = []
    for name in sorted(surface.facts.keys() | facts.keys()):
        theirs, ours = surface.facts.get(name, "(absent)"), facts.get(name, "(absent)")
        if theirs != ours:
            parts = differing_parts(name, theirs, ours)
            wrong.append(", ".join(f"{part} was {old}, now {new}" for part, old, new in parts))
    if surface.context_len != context_len:
        wrong.append(f"context_len was {surface.context_len}, now {context_len}")
    lost, extra = sorted(keys - surface.points.keys()), sorted(surface.points.keys() - keys)
    if lost or extra:
        which = f"{lost[0]} is not measured" if lost else f"{extra[0]} is no longer captured"
        wrong.append(f"{len(lost)} pairs more and {len(extra)} fewer are captured, {which}")
    return wrong
