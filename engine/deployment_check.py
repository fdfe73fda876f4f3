"""What start-up refuses before it compiles: settings against checkpoint, tokenizer and machine.

Owns the rules that take two of them to break; what one of them says alone is checked where it is
read. Reads config.json, tokenizer.json and the headers of the tensor files, never a weight, and
imports no compiler. Start-up and `decodegrid config check` run the same functions, so that they
refuse the same things in the same words.
"""

import os
from pathlib import Path

import torch

from decodegrid.configs.load import LoadedConfig
from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine.compute_dtypes import DTYPES
from decodegrid.engine.package_start import check_named_package
from decodegrid.engine.pool_size import resolve_num_blocks
from decodegrid.engine.region_facts import model_facts
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.window_snapshots import window_slack
from decodegrid.graphs.bounded_replay import check_bounded_replay
from decodegrid.graphs.checkpoint import (
    WeightForm,
    check_form,
    inspect_checkpoint,
    read_checkpoint_config,
)
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


def check_model(config: ModelConfig, capacity: Capacity) -> None:
    """Refuse deployments that this model cannot serve, naming both sides."""
    check_channels(config, capacity.kv_cache)
    check_bounded_replay(
        config, capacity.bounded_replay, capacity.keep_tokens, capacity.num_draft_tokens
    )
    if config.engram_layer_ids and config.engram_max_ngram_size > MAX_NGRAM:
        raise ValueError(
            f"engram_max_ngram_size is {config.engram_max_ngram_size}; "
            f"at most {MAX_NGRAM} is supported"
        )
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
    if capacity.max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"scheduler.max_model_len is {capacity.max_model_len}; the checkpoint's "
            f"max_position_embeddings is {config.max_position_embeddings}"
        )


def check_settings(loaded: LoadedConfig) -> ModelConfig:
    """Check the settings against config.json and the machine; returns the model's config.

    A pool of `cache.memory_fraction` is left to start-up, which measures the memory that is free
    once the weights are in it. Raises ValueError, or CheckpointError for the directory and its
    config.json.
    """
    config = loaded.config
    model = read_checkpoint_config(loaded.checkpoint_dir)
    check_model(model, capacity_of(config, resolve_num_blocks(config, model, None)))
    _check_surface_room(config)
    if config.model.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("model.device is cuda, but torch finds no CUDA device")
    package = loaded.package_dir
    if package is not None:
        dtype, threads = DTYPES[config.model.dtype], config.model.num_threads
        check_named_package(package, model_facts(model, dtype, config.model.device, threads))
    # A package has the native kernels that are otherwise built in the cache directory.
    _check_cache_dir(loaded.cache_dir, needed=config.model.device == "cpu" and package is None)
    return model


def check_before_start(loaded: LoadedConfig) -> Tokenizer:
    """`check_settings`, and the tokenizer, which must fit the model.

    Raises ValueError, or OSError where there is no tokenizer.json.
    """
    model = check_settings(loaded)
    tokenizer = Tokenizer(loaded.checkpoint_dir / "tokenizer.json")
    tokenizer.check_vocabulary(model.vocab_size)
    return tokenizer


def check_deployment(loaded: LoadedConfig) -> None:
    """All that start-up checks before it compiles, the tensors of the checkpoint included, and
    whether these can lie in memory as the deployment says.

    Raises ValueError (CheckpointError for the checkpoint) or OSError at the first thing found.
    """
    check_before_start(loaded)
    checked, model = inspect_checkpoint(loaded.checkpoint_dir), loaded.config.model
    form = weight_form(loaded.config, checked.model.config)
    check_form(checked, model.device, DTYPES[model.dtype], form, model.engram_tables)


def _check_surface_room(config: DeploymentConfig) -> None:
    """A step is measured on a context of at least one token, with room for all its drafts."""
    drafts, length = config.speculation.num_draft_tokens, config.scheduler.max_model_len
    is_measured = config.speculation.verify_tokens == "scheduled" and config.surface.repeats > 0
    if drafts and is_measured and length < drafts + 2:
        raise ValueError(
            f"scheduler.max_model_len is {length}; measuring step times with "
            f"speculation.num_draft_tokens = {drafts} needs at least {drafts + 2} "
            "(surface.repeats 0 measures none)"
        )


def _check_cache_dir(cache_dir: Path, needed: bool) -> None:
    """Refuse a cache directory that cannot be written, unless the native kernels are in it."""
    place = next(path for path in (cache_dir, *cache_dir.parents) if path.exists())
    if not needed or (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return
    # Imported here: it imports torch's code generator, and only this case needs it.
    from decodegrid.kernels.native import require_library

    what = "cannot be written" if place.is_dir() else "is no directory"
    require_library(cache_dir, f"{place} {what}")
