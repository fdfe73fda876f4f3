"""The state of a computed prompt as one object: taken from a slot, saved, loaded, put into a slot.

Owns what belongs to it (the window of every layer, entries and index keys of every kv source, the
open pair of a compressor, the prompt's ids) and the facts that both engines must agree on. Layout
is by position and by entry, so that block sizes, ring lengths, blocks and slots may differ.
Source: the two parts of a request's state that DeepInfer sends from prefill to decode.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from decodegrid.configs.strict_json import load_json
from decodegrid.engine.request import Request
from decodegrid.engine.runner import Runner
from decodegrid.engine.runner_protocol import StepRunner
from decodegrid.graphs.state import SourcePool
from decodegrid.graphs.target_step import StepModel

FORMAT = 1
"""Of the saved file; another number is refused."""
_KEY = "decodegrid_hand_over"
_IDS = "prompt_token_ids"
_DIGEST = "sha256"


class HandOverError(ValueError):
    """A state that this engine cannot take, or a file that holds none."""


@dataclass(frozen=True, slots=True)
class HandOverFacts:
    """What exporting and importing engine must have in common."""

    format: int
    kv_cache: str
    dtype: str
    """Of keys, or uint8 for records."""
    num_windows: int
    """Layers with a window, the drafter's included where there are drafts."""
    model: str
    """Hash of the model's config and of a part of its weights."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """A prompt of L tokens whose first L - 1 are computed."""

    facts: HandOverFacts
    prompt_token_ids: tuple[int, ...]
    tensors: dict[str, Tensor]
    """On the CPU: window.N (positions, columns), the last `sliding_window` at most, oldest first;
    keys.N and index_keys.N (entries, columns); open_pair.N (1, 2 * head_dim) where a pair is
    open."""

    @property
    def num_tokens(self) -> int:
        """Computed tokens."""
        return len(self.prompt_token_ids) - 1

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def save(self, path: Path) -> None:
        """Write a safetensors file. Raises OSError."""
        ids = torch.tensor(self.prompt_token_ids, dtype=torch.int64)
        digest = _digest({**self.tensors, _IDS: ids})
        metadata = {_KEY: json.dumps({**asdict(self.facts), _DIGEST: digest})}
        try:
            save_file({**self.tensors, _IDS: ids}, path, metadata)
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from error


def load_hand_over(path: Path) -> HandOver:
    """Read what save() wrote. Raises HandOverError, or OSError for the file."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = load_json((file.metadata() or {}).get(_KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise HandOverError(f"{path}: no hand-over file: {error}") from error
    kinds = {field.name: field.type for field in fields(HandOverFacts)}
    if not isinstance(facts, dict) or facts.keys() != {*kinds, _DIGEST}:
        raise HandOverError(f"{path}: no hand-over file of format {FORMAT}")
    digest = facts.pop(_DIGEST)
    for name, kind in kinds.items():
        if type(facts[name]) is not kind:
            raise HandOverError(f"{path}: {name} is {facts[name]!r}, which is no {kind}")
    ids = tensors.get(_IDS)
    if ids is None or ids.dtype != torch.int64 or ids.ndim != 1 or digest != _digest(tensors):
        raise HandOverError(f"{path}: the file is damaged: its contents are not what was saved")
    del tensors[_IDS]
    return HandOver(HandOverFacts(**facts), tuple(ids.tolist()), tensors)


def _digest(tensors: dict[str, Tensor]) -> str:
    """Hash of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def facts_of(model: StepModel) -> HandOverFacts:
    """The facts of an engine; reads some small weights from the device."""
    state, weights = model.state, model.weights
    digest = hashlib.sha256(repr(model.config).encode())
    small = [weights.norm, *(part for layer in weights.layers for part in _sample(layer))]
    for tensor in small:
        digest.update(tensor.detach().double().cpu().numpy().tobytes())
    dtype = str(state.window_rings[0].dtype).removeprefix("torch.")
    kv_cache = state.capacity.kv_cache
    return HandOverFacts(FORMAT, kv_cache, dtype, len(state.window_rings), digest.hexdigest()[:32])


def _sample(layer: Any) -> tuple[Tensor, ...]:
    """Weights of a layer that differ between checkpoints and keep the model's dtype."""
    return layer.attention.kv_norm, layer.attention.sink, layer.moe.gate


def exporter(runner: StepRunner) -> Callable[[Request], HandOver]:
    """A function that copies the state of a request whose prompt is computed to the CPU."""
    model = _model_of(runner)
    facts = facts_of(model)

    def export(request: Request) -> HandOver:
        ids, tensors = request.token_ids, {}
        places = _places(model, request.slot, request.block_ids, len(ids) - 1)
        for name, (source, rows) in places.items():
            tensors[name] = source[rows.to(source.device)].cpu()
        return HandOver(facts, tuple(ids), tensors)

    return export


def importer(runner: StepRunner, hand_over: HandOver) -> Callable[[int, Sequence[int]], None]:
    """A function that writes a state to a slot and its blocks; what decodes next begins behind it.

    Raises HandOverError for a state that does not fit the runner.
    """
    model = _model_of(runner)
    check_hand_over(model, hand_over)

    def load(slot: int, block_ids: Sequence[int]) -> None:
        for name, (target, rows) in _places(model, slot, block_ids, hand_over.num_tokens).items():
            tensor = hand_over.tensors[name].to(target.device)
            target.index_copy_(0, rows.to(target.device), tensor)

    return load


def _model_of(runner: StepRunner) -> StepModel:
    if not isinstance(runner, Runner):
        raise TypeError(f"a state is of the tensors of a Runner, got {type(runner).__name__}")
    return runner.model


def check_hand_over(model: StepModel, hand_over: HandOver) -> None:
    """Refuse a state that does not fit this engine, before anything is written.

    Raises HandOverError with the first thing that differs, on both sides.
    """
    mine = facts_of(model)
    for field in fields(HandOverFacts):
        theirs, own = getattr(hand_over.facts, field.name), getattr(mine, field.name)
        if theirs != own:
            raise HandOverError(f"the state is of {field.name} {theirs}, this engine has {own}")
    capacity = model.state.capacity
    if not 0 <= hand_over.num_tokens < capacity.max_model_len:
        raise HandOverError(
            f"the state is of a prompt of {hand_over.num_tokens + 1} tokens; this engine takes "
            f"1 to {capacity.max_model_len}"
        )
    num_blocks = -(-hand_over.num_tokens // capacity.block_size)
    places = _places(model, 1, list(range(1, num_blocks + 1)), hand_over.num_tokens)
    if hand_over.tensors.keys() != places.keys():
        odd = sorted(hand_over.tensors.keys() ^ places.keys())
        raise HandOverError(f"the state lacks or should not have the tensor {odd[0]}")
    for name, (target, rows) in places.items():
        got = hand_over.tensors[name]
        want = (len(rows), target.shape[1])
        if tuple(got.shape) != want or got.dtype != target.dtype:
            raise HandOverError(
                f"{name} of a prompt with {hand_over.num_tokens} computed tokens must be "
                f"{target.dtype} {want}, got {got.dtype} {tuple(got.shape)}"
            )


def _places(
    model: StepModel, slot: int, block_ids: Sequence[int], num_tokens: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Where each part of a state of `num_tokens` positions lies: a tensor and its rows."""
    state, config = model.state, model.config
    first = max(0, num_tokens - config.sliding_window)
    positions = torch.arange(first, num_tokens)
    ring_rows = slot * state.ring_len + positions % state.ring_len
    found = {f"window.{layer}": (ring, ring_rows) for layer, ring in enumerate(state.window_rings)}
    table = torch.tensor(list(block_ids), dtype=torch.int64)
    for layer, pool in state.pools.items():
        found.update(_source_places(model, layer, pool, slot, table, num_tokens))
    return found


def _source_places(
    model: StepModel, layer: int, pool: SourcePool, slot: int, table: Tensor, num_tokens: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """The parts of one kv source."""
    state, ratio = model.state, model.config.compress_ratios[layer]
    per_block = state.capacity.block_size // ratio
    entries = torch.arange(num_tokens // ratio)
    rows = table[entries // per_block] * per_block + entries % per_block
    found = {f"keys.{layer}": (pool.keys, rows), f"index_keys.{layer}": (pool.index_keys, rows)}
    if num_tokens % ratio:
        last = slot * state.compressor_len + (num_tokens - 1) % state.compressor_len
        found[f"open_pair.{layer}"] = (pool.compressor, torch.tensor([last]))
    return found
