"""The hook through which masks over the vocabulary get between the two halves of a rich step.

Owns its shape and the form without masks. Data flow: the loop launches the first half, commits the
step before, asks for masks and launches the second half with them.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from decodegrid.engine.request import Request


class StepMasks(Protocol):
    """Fills the masks of rich steps."""

    def fill(
        self, requests: Sequence[Request], drafts: Sequence[NDArray[np.int64] | None]
    ) -> NDArray[np.int32] | None:
        """Masks as in `StepRunner.launch_choice`; None allows everything.

        Every earlier step is committed. requests: of the rows; some may have ended with that, and
        what is chosen for those is dropped. drafts: (K,) of each row, which the step verifies as
        far as the device gives it query tokens; None where the row has none.
        """
        ...


class NoMasks:
    """Allows everything."""

    def fill(
        self, requests: Sequence[Request], drafts: Sequence[NDArray[np.int64] | None]
    ) -> NDArray[np.int32] | None:
        """None."""
        return None
