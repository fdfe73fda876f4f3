"""The `parallel` section of a deployment: over how many processes a model is spread.

Owns the names, bounds and defaults of its fields. Reads no file and no environment. This version
runs one process; a start refuses more (engine/deployment_check.py), and `decodegrid config check`
still says what each of them would hold.
"""

from typing import Annotated

from pydantic import Field

from decodegrid.configs.sections import Section


class ParallelSection(Section):
    """Processes that serve one model together, each with one GPU and requests of its own.

    What the other sections say, `scheduler.max_num_reqs` and the size of the pool among it, holds
    for each process.
    """

    expert: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes among which the routed experts and the Engram tables are divided, 1 to 1024; each
    holds all other weights. It divides the numbers of experts. 1 for one process; a start of this
    version refuses more."""
