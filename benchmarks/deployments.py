"""The deployments that the benchmark compares, each started once.

Owns which settings differ between them and the phase table of a start. Data flow: configuration ->
runner and clock -> LLM.
"""

from dataclasses import dataclass
from pathlib import Path

from decodegrid.capture.grid import GraphKey, build_grid
from decodegrid.capture.phases import PhaseClock
from decodegrid.configs.load import LoadedConfig, load_config
from decodegrid.engine.build import build_runner
from decodegrid.engine.llm import LLM
from decodegrid.engine.runner import Runner
from decodegrid.engine.surface_run import make_policy
from decodegrid.engine.tokenizer import Tokenizer

STEP_KEYS = (GraphKey(1, 1), GraphKey(1, 6), GraphKey(8, 8), GraphKey(8, 48))
"""Pairs whose captured step is compared with the eager one."""
ALONE = ("cache.prefix_cache=off",)
"""For runners that several LLMs use in turns: each would believe its cached blocks intact."""
WITHOUT_DRAFTER = (
    "speculation.num_draft_tokens=0",
    "speculation.verify_tokens=all",
    "grid.num_query_tokens_per_req=[]",
)
"""What turns a deployment into the same one without speculation."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A started deployment."""

    loaded: LoadedConfig
    runner: Runner
    clock: PhaseClock
    """Stopped when the runner was ready."""
    had_compile_cache: bool
    """Whether the compile cache held anything before the start."""

    def make_llm(self) -> LLM:
        """A fresh LLM (counters at 0) around the runner."""
        config = self.loaded.config
        return LLM.from_runner(
            self.runner,
            Tokenizer(self.loaded.checkpoint_dir / "tokenizer.json"),
            decode_steps_per_prefill_chunk=config.scheduler.decode_steps_per_prefill_chunk,
            policy=make_policy(self.runner, self.loaded),
            async_scheduling=config.has_step_in_flight,
        )


def load_deployment(path: Path | None, overrides: tuple[str, ...]) -> LoadedConfig:
    """Read the deployment to measure and check that it has what the benchmark compares.

    Raises ConfigError for the file; ValueError for a device other than the CPU, or a grid without
    one of STEP_KEYS.
    """
    loaded = load_config(path, (*ALONE, *overrides))
    config = loaded.config
    if config.model.device != "cpu":
        raise ValueError(f"model.device is {config.model.device}; the benchmark times the CPU only")
    keys = build_grid(
        config.scheduler.max_num_reqs,
        config.speculation.num_draft_tokens,
        config.grid.num_reqs,
        config.grid.num_query_tokens_per_req,
    ).keys
    missing = [str(key) for key in STEP_KEYS if key not in keys]
    if missing:
        raise ValueError(f"the deployment's grid lacks {', '.join(missing)}")
    return loaded


def start(loaded: LoadedConfig) -> Deployment:
    """Load, compile and capture; sets torch's number of threads."""
    cache = loaded.cache_dir
    had_cache = cache.is_dir() and any(cache.iterdir())
    clock = PhaseClock()
    return Deployment(loaded, build_runner(loaded, clock), clock, had_cache)
