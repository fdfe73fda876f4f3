"""The step-time surface that a package carries.

Owns when it serves: for as long as it is of this machine and these graphs, whatever its age,
because a package is kept to be started from later. Does not measure
(`decodegrid.engine.surface_run`).
"""

import math
from collections.abc import Iterable, Mapping

from decodegrid.capture.grid import GraphKey
from decodegrid.capture.package import SURFACES, PackageError, checked_file
from decodegrid.capture.surface import Surface
from decodegrid.capture.surface_store import SurfaceStore
from decodegrid.engine.package_start import StartSource


def packaged_surface(
    source: StartSource | None,
    keys: Iterable[GraphKey],
    context_len: int,
    facts: Mapping[str, str],
    now: float,
) -> tuple[Surface | None, str]:
    """The surface in the directory that a start came from, or None and why ("" where there is
    none to look at).

    now: seconds since 1970.
    """
    names = [] if source is None or source.manifest is None else source.manifest.names(SURFACES)
    if source is None or source.manifest is None or not names:
        return None, ""
    try:
        for name in names:
            checked_file(source.path, source.manifest, name)
    except PackageError as error:
        source.note(f"{error}; not used")
        return None, str(error)
    return SurfaceStore(source.path / SURFACES).load(
        keys, context_len=context_len, facts=facts, max_age_s=math.inf, now=now
    )
