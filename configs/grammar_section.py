"""The `structured_outputs` section of a deployment: how grammars are compiled.

Owns the names, bounds and defaults of its fields. Reads no file and no environment.
"""

from typing import Annotated

from pydantic import Field

from decodegrid.configs.sections import Section


class StructuredOutputsSection(Section):
    """Grammars are compiled beside the steps; a request waits for its own, and nobody else does."""

    compile_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Grammars compiled at once, 1 to 64."""

    compile_timeout_s: Annotated[float, Field(gt=0.0, le=3600.0)] = 20.0
    """Seconds after its arrival at which a request without its grammar fails, up to 3600."""

    cache_bytes: Annotated[int, Field(ge=0, le=2**40)] = 2**28
    """Memory for compiled grammars that later requests may ask for again, up to 1 TiB; the ones
    unused for longest go first. 0 keeps none."""
