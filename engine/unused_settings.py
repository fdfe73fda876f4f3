"""Settings that a deployment names and that do nothing beside the others that it names.

Owns the table. A setting counts where it was given and is not the default: a file that spells
everything out, as the embedded one does, says nothing by a default. Data flow: a loaded deployment
-> lines for `decodegrid config check`.
"""

from collections.abc import Callable, Iterator
from types import MappingProxyType

from decodegrid.configs.load import FROM_DEFAULT, LoadedConfig
from decodegrid.configs.schema import DeploymentConfig
from decodegrid.configs.value_text import show_value

Idle = Callable[[DeploymentConfig], str | None]
"""What makes a setting do nothing, in words; None where it does something."""


def _without_surface(config: DeploymentConfig) -> str | None:
    if config.speculation.num_draft_tokens == 0:
        return "speculation.num_draft_tokens = 0"
    verify = config.speculation.verify_tokens
    return None if verify == "scheduled" else f"speculation.verify_tokens = {verify}"


def _without_measuring(config: DeploymentConfig) -> str | None:
    found = _without_surface(config)
    return "surface.repeats = 0" if found is None and config.surface.repeats == 0 else found


def _without_drafts(config: DeploymentConfig) -> str | None:
    none = config.speculation.num_draft_tokens == 0
    return "speculation.num_draft_tokens = 0" if none else None


def _without_prefix_cache(config: DeploymentConfig) -> str | None:
    return "cache.prefix_cache = off" if config.cache.prefix_cache == "off" else None


def _without_rich(config: DeploymentConfig) -> str | None:
    return None if config.grid.rich else "grid.rich = false"


def _without_dumps(config: DeploymentConfig) -> str | None:
    return "dumps.num_steps = 0" if config.dumps.num_steps == 0 else None


def _on_the_cpu(config: DeploymentConfig) -> str | None:
    return "model.device = cpu" if config.model.device == "cpu" else None


def _is_one_process(config: DeploymentConfig) -> str | None:
    return "scheduler.engine_type = prompt" if config.scheduler.engine_type == "prompt" else None


RULES = MappingProxyType[str, Idle](
    {
        "surface.context_len": _without_measuring,
        "surface.repeats": _without_surface,
        "surface.max_age_s": _without_surface,
        "speculation.verify_tokens": _without_drafts,
        "speculation.budget_rates": _without_surface,
        "cache.prefix_snapshots": _without_prefix_cache,
        "compile.cubins_dir": _on_the_cpu,
        "structured_outputs.compile_threads": _without_rich,
        "structured_outputs.compile_timeout_s": _without_rich,
        "structured_outputs.cache_bytes": _without_rich,
        "dumps.directory": _without_dumps,
        "dumps.keep": _without_dumps,
        "dumps.token_ids": _without_dumps,
        "dumps.watchdog_s": _without_dumps,
        "dumps.check_logits": _without_dumps,
        "scheduler.decode_steps_per_prefill_chunk": _is_one_process,
    }
)
"""Dotted key -> what would make it idle."""


def unused_settings(loaded: LoadedConfig) -> Iterator[str]:
    """A line for each setting that was given and does nothing, with its place."""
    usual = dict(_values(DeploymentConfig()))
    for key, value in _values(loaded.config):
        origin = loaded.origins[key]
        if key not in RULES or origin == FROM_DEFAULT or value == usual[key]:
            continue
        why = RULES[key](loaded.config)
        if why is not None:
            yield f"{origin}: {key} = {show_value(value)} does nothing with {why}"


def _values(config: DeploymentConfig) -> Iterator[tuple[str, object]]:
    for key in RULES:
        section, name = key.split(".")
        yield key, getattr(getattr(config, section), name)
