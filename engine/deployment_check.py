"""What start-up refuses before it compiles: settings against checkpoint, tokenizer and machine.

Owns the rules that take two of them to break; what one of them says alone is checked where it is
read. Reads config.json and tokenizer.json, never a weight, and imports no compiler. Start-up runs
them one after another and stops at the first that raises; `decodegrid config check` runs the same
functions and goes on (engine/deployment_findings.py), so that both refuse the same in the same
words.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from decodegrid.configs.load import LoadedConfig
from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine.compute_dtypes import DTYPES
from decodegrid.engine.cubin_folder import check_cubins
from decodegrid.engine.package_start import check_named_package
from decodegrid.engine.pool_size import resolve_num_blocks
from decodegrid.engine.region_facts import model_facts
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.window_snapshots import window_slack
from decodegrid.graphs.bounded_replay import check_bounded_replay
from decodegrid.graphs.checkpoint import WeightForm, read_checkpoint_config
from decodegrid.graphs.kv_cache import check_channels
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.state import Capacity

MAX_NGRAM = 4
"""Slot state holds three earlier tokens, which serves n-grams of up to four."""


def capacity_of(config: DeploymentConfig, num_blocks: int) -> Capacity:
    """What the deployment chooses about state; num_blocks: of the pool, as `size_pool` says."""
    drafts, slack = config.speculation.num_draft_tokens, 0
    if config.cache.prefix_cache == "on":
        slack = window_slack(config.cache.block_size, drafts)
    return Capacity(
        config.scheduler.max_num_reqs + 1,
        num_blocks,
        config.cache.block_size,
        config.scheduler.max_model_len,
        drafts,
        config.speculation.verify,
        config.cache.kv_cache,
        slack,
        config.grid.rich,
        config.prefill.bounded_replay,
        config.prefill.keep_tokens,
    )


def weight_form(config: DeploymentConfig, model: ModelConfig) -> WeightForm:
    """`model.weights` of a deployment, "auto" resolved: expanded on the CPU and for checkpoints of
    floats, packed on CUDA."""
    if config.model.weights != "auto":
        return config.model.weights
    return "packed" if model.quantized and config.model.device == "cuda" else "expanded"


def _fits_records(config: ModelConfig, capacity: Capacity) -> None:
    check_channels(config, capacity.kv_cache)


def _replays_as_asked(config: ModelConfig, capacity: Capacity) -> None:
    check_bounded_replay(
        config, capacity.bounded_replay, capacity.keep_tokens, capacity.num_draft_tokens
    )


def _has_short_ngrams(config: ModelConfig, capacity: Capacity) -> None:
    if config.engram_layer_ids and config.engram_max_ngram_size > MAX_NGRAM:
        raise ValueError(
            f"engram_max_ngram_size is {config.engram_max_ngram_size}; "
            f"at most {MAX_NGRAM} is supported"
        )


def _makes_the_drafts(config: ModelConfig, capacity: Capacity) -> None:
    if capacity.num_draft_tokens > 0 and config.num_nextn_predict_layers == 0:
        raise ValueError(
            f"speculation.num_draft_tokens is {capacity.num_draft_tokens}, but the checkpoint has "
            "no drafter (num_nextn_predict_layers is 0)"
        )
    if capacity.num_draft_tokens > config.dspark_block_size:
        raise ValueError(
            f"speculation.num_draft_tokens is {capacity.num_draft_tokens}; the drafter's "
            f"dspark_block_size allows at most {config.dspark_block_size}"
        )


def _knows_the_positions(config: ModelConfig, capacity: Capacity) -> None:
    if capacity.max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"scheduler.max_model_len is {capacity.max_model_len}; the checkpoint's "
            f"max_position_embeddings is {config.max_position_embeddings}"
        )


MODEL_RULES: tuple[Callable[[ModelConfig, Capacity], None], ...] = (
    _fits_records,
    _replays_as_asked,
    _has_short_ngrams,
    _makes_the_drafts,
    _knows_the_positions,
)
"""What a model and a capacity must keep to fit each other; each raises ValueError, naming both."""


def check_model(config: ModelConfig, capacity: Capacity) -> None:
    """Refuse deployments that this model cannot serve, naming both sides."""
    for rule in MODEL_RULES:
        rule(config, capacity)


def check_settings(loaded: LoadedConfig) -> ModelConfig:
    """Check the settings against config.json and the machine; returns the model's config.

    A pool of `cache.memory_fraction` is left to start-up, which measures the memory that is free
    once the weights are in it. Raises ValueError, or CheckpointError for the directory and its
    config.json.
    """
    config = loaded.config
    check_processes(config)
    model = read_checkpoint_config(loaded.checkpoint_dir)
    check_model(model, capacity_of(config, resolve_num_blocks(config, model, None)))
    check_surface_room(config)
    check_package_backend(loaded)
    check_device(config)
    check_package(loaded, model)
    check_cubins(loaded)
    check_caches(loaded)
    return model


def check_before_start(loaded: LoadedConfig) -> Tokenizer:
    """`check_settings`, and the tokenizer, which must fit the model.

    Raises ValueError, or OSError where there is no tokenizer.json.
    """
    model = check_settings(loaded)
    tokenizer = Tokenizer(loaded.checkpoint_dir / "tokenizer.json")
    tokenizer.check_vocabulary(model.vocab_size)
    return tokenizer


def check_processes(config: DeploymentConfig) -> None:
    """Refuse more processes than this version runs."""
    expert = config.parallel.expert
    if expert > 1:
        raise ValueError(
            f"parallel.expert is {expert}: needs {expert} processes, each with a GPU; this "
            "version runs one"
        )


def check_surface_room(config: DeploymentConfig) -> None:
    """A step is measured on a context of at least one token, with room for all its drafts."""
    drafts, length = config.speculation.num_draft_tokens, config.scheduler.max_model_len
    is_measured = config.speculation.verify_tokens == "scheduled" and config.surface.repeats > 0
    if drafts and is_measured and length < drafts + 2:
        raise ValueError(
            f"scheduler.max_model_len is {length}; measuring step times with "
            f"speculation.num_draft_tokens = {drafts} needs at least {drafts + 2} "
            "(surface.repeats 0 measures none)"
        )


def check_device(config: DeploymentConfig) -> None:
    """Refuse a device that this machine does not have."""
    if config.model.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("model.device is cuda, but torch finds no CUDA device")


def check_package_backend(loaded: LoadedConfig) -> None:
    """Refuse a package for a back end that makes no code. Raises ValueError."""
    backend = loaded.config.compile.backend
    if loaded.package_dir is not None and backend != "inductor":
        raise ValueError(
            f"compile.backend is {backend}; only inductor makes the code that a package holds "
            f"({loaded.package_dir})"
        )


def check_package(loaded: LoadedConfig, model: ModelConfig) -> None:
    """Refuse a package that cannot be of this deployment. Raises PackageError."""
    package, config = loaded.package_dir, loaded.config
    if package is not None:
        dtype, threads = DTYPES[config.model.dtype], config.model.num_threads
        check_named_package(package, model_facts(model, dtype, config.model.device, threads))


def check_caches(loaded: LoadedConfig) -> None:
    """Refuse a cache directory in which the native kernels are needed and cannot be built."""
    # A package has the native kernels that are otherwise built in the cache directory.
    needed = loaded.config.model.device == "cpu" and loaded.package_dir is None
    _check_cache_dir(loaded.cache_dir, needed=needed)


def _check_cache_dir(cache_dir: Path, needed: bool) -> None:
    """Refuse a cache directory that cannot be written, unless the native kernels are in it."""
    place = next(path for path in (cache_dir, *cache_dir.parents) if path.exists())
    if not needed or (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return
    # Imported here: it imports torch's code generator, and only this case needs it.
    from decodegrid.kernels.native import require_library

    what = "cannot be written" if place.is_dir() else "is no directory"
    require_library(cache_dir, f"{place} {what}")
