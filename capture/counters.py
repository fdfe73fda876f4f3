"""Counters of compilations and captures, held against their plans.

Owns the numbers and the moment at which start-up declares itself ready. Does not compile or
capture. Data flow: regions and the capture driver plan and count here; start-up calls
`declare_ready`; tests, reports and the engine read `compilations_after_ready` or call
`check_still`.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class CaptureCounters:
    """How many compilations and captures were planned and made.

    num_compilations counts Dynamo frames that reached the compiler; num_captured counts captured
    pairs.
    """

    planned_by_region: dict[str, int] = field(default_factory=dict)
    """Planned compilations (variants) of each region, by region name."""
    compiled_by_region: dict[str, int] = field(default_factory=dict)
    """Compilations made of each region, by region name."""
    loaded_by_region: dict[str, int] = field(default_factory=dict)
    """Compilations that a store replaced, by region name."""
    planned_captures: int = 0
    """Captures that the grids asked for."""
    num_captured: int = 0
    """Captures made."""
    _ready: tuple[int, int] | None = None

    @property
    def planned_compilations(self) -> int:
        """Sum of the planned variants of all regions."""
        return sum(self.planned_by_region.values())

    @property
    def num_compilations(self) -> int:
        """Compilations made so far."""
        return sum(self.compiled_by_region.values())

    @property
    def num_loaded(self) -> int:
        """Compilations that a store replaced so far."""
        return sum(self.loaded_by_region.values())

    @property
    def is_ready(self) -> bool:
        """Whether `declare_ready` has succeeded."""
        return self._ready is not None

    @property
    def compilations_after_ready(self) -> int:
        """Compilations made after `declare_ready`; 0 before it."""
        return 0 if self._ready is None else self.num_compilations - self._ready[0]

    @property
    def captures_after_ready(self) -> int:
        """Captures made after `declare_ready`; 0 before it."""
        return 0 if self._ready is None else self.num_captured - self._ready[1]

    def plan_region(self, name: str, variants: int) -> None:
        """Add a region's planned compilations.

        Raises:
            ValueError: the name is taken.
        """
        if name in self.planned_by_region:
            raise ValueError(f"region {name!r} is registered twice; give the second another name")
        self.planned_by_region[name] = variants
        self.compiled_by_region[name] = 0
        self.loaded_by_region[name] = 0

    def count_compilation(self, name: str) -> None:
        """Count one compilation of a planned region."""
        self.compiled_by_region[name] += 1

    def count_loaded(self, name: str) -> None:
        """Count one planned compilation that a stored one replaces."""
        self.loaded_by_region[name] += 1

    def num_present(self, name: str) -> int:
        """Variants of a region that are compiled or loaded."""
        return self.compiled_by_region[name] + self.loaded_by_region[name]

    def declare_ready(self) -> None:
        """Check both counters against their plans and start watching them.

        Raises:
            RuntimeError: names the regions or the captures that differ from the plan.
        """
        wrong = [
            f"{name} compiled or loaded {self.num_present(name)} of {planned}"
            for name, planned in self.planned_by_region.items()
            if self.num_present(name) != planned
        ]
        if self.num_captured != self.planned_captures:
            wrong.append(f"captured {self.num_captured} of {self.planned_captures} pairs")
        if wrong:
            raise RuntimeError("start-up does not match its plan: " + "; ".join(wrong))
        self._ready = (self.num_compilations, self.num_captured)

    def check_still(self) -> None:
        """Check that nothing was compiled or captured since `declare_ready`.

        Raises:
            RuntimeError: not ready yet, or a counter moved.
        """
        if self._ready is None:
            raise RuntimeError("counters are not watched yet: start-up is not ready")
        if self.compilations_after_ready or self.captures_after_ready:
            raise RuntimeError(
                f"after ready: {self.compilations_after_ready} compilations and "
                f"{self.captures_after_ready} captures; both must be 0"
            )
