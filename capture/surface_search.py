"""Finds a kept surface for a plan: of any pairs, as long as the largest one is among them.

Owns the rule what fits. Unlike a start of the engine, a plan interpolates, so a surface of another
grid serves it. Data flow: the directory of `decodegrid.capture.surface_store` -> Surface, or why
there is none.
"""

import fnmatch
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from decodegrid.capture.grid import GraphKey
from decodegrid.capture.profile_document import MAX_FILE_BYTES, ProfileError, read_profile
from decodegrid.capture.surface import Surface, SurfaceError
from decodegrid.configs.strict_json import read_json


@dataclass(frozen=True, slots=True)
class SurfaceWish:
    """What a surface has to be like."""

    largest: GraphKey
    """A pair that it has a time for."""
    context_len: int
    facts: Mapping[str, str]
    """Those that are known; a surface may have more."""
    max_age_s: float

    def misfits(self, surface: Surface) -> list[str]:
        """What of a surface is not as wished, but for its age; one phrase each."""
        wrong = [
            f"{name} was {surface.facts.get(name, '(absent)')}, now {value}"
            for name, value in sorted(self.facts.items())
            if surface.facts.get(name) != value
        ]
        if surface.context_len != self.context_len:
            wrong.append(f"context_len was {surface.context_len}, now {self.context_len}")
        if self.largest not in surface.points:
            wrong.append(f"{self.largest} is not measured")
        return wrong


def find_surface(directory: Path, wish: SurfaceWish, now: float) -> tuple[Surface | None, str]:
    """The kept surface with the most pairs, of several the newest.

    Args:
        now: seconds since 1970.

    Returns:
        The surface and its file, or None and the reason; of several files the reason tells of the
        one that comes closest.
    """
    found: list[tuple[int, float, str, Surface]] = []
    misfits: list[tuple[int, float, str]] = []
    try:
        names = sorted(fnmatch.filter(os.listdir(directory), "surface-*.json"))
    except FileNotFoundError:
        names = []
    except OSError as error:
        return None, f"cannot read {directory}: {error}"
    for name in names:
        path = directory / name
        try:
            surface = read_surface(path)
        except (OSError, SurfaceError) as error:
            misfits.append((len(wish.facts) + 2, 0.0, f"cannot use {path}: {error}"))
            continue
        wrong, age = wish.misfits(surface), surface.age(now)
        if wrong:
            misfits.append((len(wrong), age, f"{path}: {'; '.join(wrong)}"))
        elif not 0.0 <= age <= wish.max_age_s:
            limit = f"allowed are 0..{wish.max_age_s:.0f} s"
            misfits.append((0, age, f"{path}: its age is {age:.0f} s, {limit}"))
        else:
            found.append((len(surface.points), surface.measured_at, str(path), surface))
    if found:
        _, _, place, surface = max(found, key=lambda item: item[:3])
        return surface, place
    return None, min(misfits)[2] if misfits else f"no surface has been saved in {directory}"


def read_surface(path: Path) -> Surface:
    """A surface from a file: a kept one, or the first of a profile.

    Raises:
        SurfaceError: names the file and what of it is wrong.
        OSError: the file cannot be read.
    """
    try:
        data = read_json(path, MAX_FILE_BYTES)
    except ValueError as error:
        raise SurfaceError(f"{path}: {error}") from None
    if isinstance(data, dict) and "surfaces" in data:
        try:
            return read_profile(path).surfaces[0].surface()
        except ProfileError as error:
            raise SurfaceError(str(error)) from None
    return Surface.from_json(data, str(path))
