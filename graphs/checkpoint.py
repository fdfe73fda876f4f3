"""Checkpoint directories: a model from config.json, safetensors and tokenizer.json, and back.

Owns the order of the checks and the filling of the model's parameters. A checkpoint that does not
fit its own config gives one CheckpointError that names tensor and file, before memory for the
weights is taken.

Data flow: directory -> config -> model without memory -> headers checked against its tensors ->
memory -> tensors one by one. Saving runs the same names the other way.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from decodegrid.configs.load import CONFIGS_DIR, EMBEDDED_CHECKPOINT
from decodegrid.graphs.checkpoint_files import (
    StoredTensor,
    open_shard,
    read_headers,
    read_json_object,
    write_json,
    write_tensors,
)
from decodegrid.graphs.checkpoint_names import (
    FLOAT_DTYPES,
    CheckpointError,
    TensorSlot,
    is_vision_tensor,
    tensor_slots,
)
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.engram_vocab import compressed_token_classes
from decodegrid.graphs.model import is_wide_parameter
from decodegrid.graphs.model_config import ModelConfig, parse_model_config
from decodegrid.graphs.model_config_checks import ConfigFieldError


def checkpoint_path(checkpoint_dir: str | Path) -> Path:
    """The directory that `checkpoint_dir` means; the string "tiny" is the embedded checkpoint."""
    if checkpoint_dir == EMBEDDED_CHECKPOINT:
        return CONFIGS_DIR / EMBEDDED_CHECKPOINT
    return Path(checkpoint_dir)


def load_model(
    checkpoint_dir: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> DraftModel:
    """Read a float checkpoint (BF16, F32 or F64 tensors) into a model.

    `checkpoint_dir` is a directory, or "tiny" for the embedded model. Parameters become `dtype`,
    those that the format keeps wide (mHC, router biases, sinks) float32 at least; none of them
    requires a gradient. Needs memory for the model and one tensor. With a tokenizer.json the
    Engram's token classes come from it, otherwise a class is the id modulo the class count.

    Raises CheckpointError for whatever is wrong with the directory, ValueError for a `dtype` that
    is not one of bfloat16, float32, float64.
    """
    if dtype not in FLOAT_DTYPES.values():
        raise ValueError(f"dtype is {dtype}; must be torch.bfloat16, float32 or float64")
    model, stored, classes = _inspect(checkpoint_path(checkpoint_dir))
    _allocate(model, torch.device(device), dtype)
    _fill(model, stored)
    model.cast(dtype)
    if classes is not None:
        model.compressed_ids = classes
    return model.to(device)


def check_checkpoint(checkpoint_dir: str | Path) -> ModelConfig:
    """Everything that `load_model` checks, without reading a weight or taking memory for one.

    Names, shapes and types of the tensors come from the headers of the files, and so do the lengths
    that the files must have. Raises CheckpointError for whatever is wrong with the directory.
    """
    return _inspect(checkpoint_path(checkpoint_dir))[0].config


def _inspect(
    directory: Path,
) -> tuple[DraftModel, dict[str, StoredTensor], Tensor | None]:
    """The model without memory, its stored tensors and its token classes, all checked."""
    config = read_checkpoint_config(directory)
    stored = read_headers(directory)
    for name in ("n_routed_experts", "dspark_n_routed_experts", "num_hidden_layers"):
        # Before anything of that size is built: a count that the files cannot hold.
        if getattr(config, name) > len(stored):
            raise CheckpointError(
                f"{directory / 'config.json'}: text_config.{name} is {getattr(config, name)}, but "
                f"the checkpoint has {len(stored)} tensors in all"
            )
    with torch.device("meta"):
        model = DraftModel(config)
    _check_tensors(stored, tensor_slots(model), directory)
    if config.quantized:
        raise CheckpointError(
            f"{directory / 'config.json'}: has a quantization_config, but the tensors are floats; "
            "remove it"
        )
    return model, stored, _read_token_classes(directory, config)


def read_checkpoint_config(directory: Path) -> ModelConfig:
    """The checked model config of a checkpoint directory; raises CheckpointError."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such checkpoint directory")
    path = directory / "config.json"
    try:
        return parse_model_config(read_json_object(path))
    except ConfigFieldError as error:
        raise CheckpointError(f"{directory}: {error}") from None


def save_model(
    model: DraftModel,
    directory: Path,
    dtype: torch.dtype = torch.bfloat16,
    config_raw: dict[str, Any] | None = None,
    *,
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Write config.json and the model's tensors under their Hugging Face names.

    `config_raw` is the parsed config.json that the model was built from; its `dtype` is set to
    `dtype` (bfloat16, float32 or float64), in which all tensors are stored but the wide ones,
    which are float32 at least. Above `max_shard_bytes` the tensors go into several files with an
    index. `directory` is made if missing. Raises ValueError for another dtype, for a config_raw
    that does not describe the model, and for one with a quantization_config.
    """
    if dtype not in FLOAT_DTYPES.values():
        raise ValueError(f"dtype is {dtype}; must be torch.bfloat16, float32 or float64")
    if config_raw is None or parse_model_config(config_raw) != model.config:
        raise ValueError("config_raw does not describe the model that is saved")
    if model.config.quantized:
        raise ValueError("config_raw has a quantization_config; tensors are saved as floats")
    directory.mkdir(parents=True, exist_ok=True)
    write_json(
        directory / "config.json", {**config_raw, "dtype": str(dtype).removeprefix("torch.")}
    )
    write_tensors(directory, _stored_tensors(model, dtype), max_shard_bytes)


def _stored_tensors(model: DraftModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    wide = torch.promote_types(dtype, torch.float32)
    for slot in tensor_slots(model):
        stored = slot.target.to("cpu", wide if slot.is_wide else dtype, copy=True)
        yield slot.name, stored.contiguous()


def _check_tensors(
    stored: dict[str, StoredTensor], slots: list[TensorSlot], directory: Path
) -> None:
    wanted = {slot.name: slot for slot in slots}
    for name, tensor in stored.items():
        slot = wanted.get(name)
        if slot is None:
            if is_vision_tensor(name):
                continue
            hint = "; quantised tensors are not read" if name.endswith(".scale") else ""
            raise CheckpointError(f"{tensor.path}: unexpected tensor {name}{hint}")
        if not slot.allows(tensor.dtype):
            allowed = "F32 or F64" if slot.is_wide else "BF16, F32 or F64"
            raise CheckpointError(
                f"{tensor.path}: tensor {name} has dtype {tensor.dtype}; must be {allowed} "
                "(quantised tensors are not read)"
            )
        if tensor.shape != tuple(slot.target.shape):
            raise CheckpointError(
                f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}; config.json asks "
                f"for {list(slot.target.shape)}"
            )
    missing = [name for name in wanted if name not in stored]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{directory}: tensor {missing[0]}{more} missing")


def _read_token_classes(directory: Path, config: ModelConfig) -> Tensor | None:
    """(vocab_size,) int64 Engram classes from tokenizer.json, or None without one.

    Ids that the tokenizer does not use take the class of the pad token.
    """
    path = directory / "tokenizer.json"
    if not config.engram_layer_ids or not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        classes = compressed_token_classes(Tokenizer.from_str(text))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise CheckpointError(f"{path}: not a readable tokenizer: {error}") from None
    if len(classes) > config.vocab_size:
        raise CheckpointError(
            f"{path}: has {len(classes)} tokens, above vocab_size {config.vocab_size}"
        )
    count = max(classes, default=-1) + 1
    if count != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"{path}: has {count} compressed token classes; config.json: "
            f"text_config.engram_compressed_vocab_size is {config.engram_compressed_vocab_size}"
        )
    if config.engram_pad_token_id >= len(classes):
        raise CheckpointError(
            f"{path}: has no token {config.engram_pad_token_id}, the engram_pad_token_id"
        )
    ids = torch.full((config.vocab_size,), classes[config.engram_pad_token_id])
    ids[: len(classes)] = torch.tensor(classes)
    return ids


def _allocate(model: DraftModel, device: torch.device, dtype: torch.dtype) -> None:
    """Give every parameter memory of its final dtype, without a value."""
    wide = torch.promote_types(dtype, torch.float32)
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            kept = wide if is_wide_parameter(f"{path}.{leaf}") else dtype
            empty = torch.empty(parameter.shape, dtype=kept, device=device)
            setattr(module, leaf, nn.Parameter(empty, requires_grad=False))


def _fill(model: DraftModel, stored: dict[str, StoredTensor]) -> None:
    by_file: dict[Path, list[TensorSlot]] = {}
    for slot in tensor_slots(model):
        by_file.setdefault(stored[slot.name].path, []).append(slot)
    for path, slots in by_file.items():
        with open_shard(path) as shard:
            for slot in slots:
                slot.target.copy_(shard.get_tensor(stored[slot.name].stored_name))
