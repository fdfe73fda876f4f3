"""The watch of a deployment: its settings, and what it may ask the runner beside the protocol.

Owns how logits are looked at without holding up a launch. Data flow: deployment and ready runner ->
StepWatch.
"""

import torch

from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.replay_record import engine_facts
from decodegrid.engine.runner import Runner
from decodegrid.engine.step_watch import FinitePromise, RunnerProbes, StepWatch, WatchSettings


def make_watch(runner: Runner, loaded: LoadedConfig) -> StepWatch:
    """The watch that the deployment's `dumps` section asks for."""
    settings = loaded.config.dumps
    engine = engine_facts(runner, loaded)
    if settings.num_steps == 0:
        return StepWatch(engine)
    watch = WatchSettings(
        directory=loaded.dump_dir,
        keep=settings.keep,
        num_steps=settings.num_steps,
        token_ids=settings.token_ids,
        limit_s=settings.watchdog_s,
    )
    return StepWatch(engine, watch, runner_probes(runner, check_logits=settings.check_logits))


def runner_probes(runner: Runner, *, check_logits: bool) -> RunnerProbes:
    """What a real runner can be asked."""

    def check(num_query_tokens: int) -> FinitePromise:
        with torch.no_grad():
            # A tensor of its own: the next launch overwrites the logits.
            finite = torch.isfinite(runner.buffers.output.logits[:num_query_tokens]).all()
        return lambda: bool(finite.item())

    return RunnerProbes(
        select_key=lambda rows, tokens: runner.grid.select(rows, tokens),
        check_logits=check if check_logits else None,
    )
