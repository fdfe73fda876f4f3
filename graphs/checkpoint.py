"""Checkpoint directories: a model from config.json, safetensors and tokenizer.json, and back.

Owns the order of the checks, and which modules hold the weights: of floats or of a quantised
checkpoint's bytes. A checkpoint that does not fit its own config gives one CheckpointError that
names tensor and file, before memory for the weights is taken.

Data flow: directory -> config -> model without memory -> headers checked against its tensors
(checkpoint_check.py) -> modules that keep bytes -> memory -> tensors one by one
(checkpoint_fill.py). Saving runs the same names the other way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from decodegrid.configs.load import CONFIGS_DIR, EMBEDDED_CHECKPOINTS
from decodegrid.graphs.checkpoint_check import check_tensors
from decodegrid.graphs.checkpoint_files import (
    StoredTensor,
    read_headers,
    read_json_object,
    read_small_file,
    write_json,
    write_tensors,
)
from decodegrid.graphs.checkpoint_fill import allocate, fill, map_tables
from decodegrid.graphs.checkpoint_names import (
    FLOAT_DTYPES,
    CheckpointError,
    TensorSlot,
    tensor_slots,
)
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.engram_vocab import compressed_token_classes
from decodegrid.graphs.model_config import ModelConfig, parse_model_config
from decodegrid.graphs.model_config_checks import QUANTIZATION_CONFIG, ConfigFieldError
from decodegrid.graphs.packed_modules import Packing, pack_table, use_packed_modules
from decodegrid.graphs.quant_layout import (
    StoredKind,
    as_stored,
    quantise,
    scale_name,
    stored_kind,
)
from decodegrid.kernels.quant import Blocks

WeightForm = Literal["expanded"] | Packing
"""How a quantised checkpoint's weights lie in memory."""


@dataclass(frozen=True, slots=True)
class CheckedCheckpoint:
    """A checkpoint whose config and headers are known to agree; no weight has been read."""

    directory: Path
    model: DraftModel
    """Of floats, without memory."""
    stored: dict[str, StoredTensor]
    classes: Tensor | None
    """(vocab_size,) int64 Engram classes from tokenizer.json, or None without one."""


def checkpoint_path(checkpoint_dir: str | Path) -> Path:
    """The directory that `checkpoint_dir` means; the strings "tiny" and "tiny-v41" are the embedded
    checkpoint and its quantised form."""
    if checkpoint_dir in EMBEDDED_CHECKPOINTS:
        return CONFIGS_DIR / checkpoint_dir
    return Path(checkpoint_dir)


def load_model(
    checkpoint_dir: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    weights: WeightForm = "expanded",
    engram_tables: Literal["memory", "mapped"] = "memory",
    progress: bool = False,
) -> DraftModel:
    """Read a checkpoint of floats (BF16, F32 or F64), or a quantised one, into a model.

    `checkpoint_dir` is a directory, or "tiny" for the embedded model. Floats become `dtype`, those
    that the format keeps wide (mHC, router biases, sinks) float32 at least; none requires a
    gradient. With a tokenizer.json the Engram's token classes come from it, otherwise a class is
    the id modulo the class count.

    weights: what becomes of quantised weights. "expanded": floats in `dtype`. "packed_experts":
    routed experts stay packed bytes. "packed": all of them stay bytes. Bytes are expanded to
    `dtype` on use, with the same result. engram_tables: "mapped" leaves the tables in the
    checkpoint's files (on the CPU only), as bytes if they are quantised and as floats of `dtype`
    otherwise; no value in them is checked. progress: draw a bar on standard error.

    Needs memory for the model and, while it reads, for one file. Raises CheckpointError for
    whatever is wrong with the directory, and ValueError for arguments that do not fit.
    """
    if dtype not in FLOAT_DTYPES.values():
        raise ValueError(f"dtype is {dtype}; must be torch.bfloat16, float32 or float64")
    _check_choice("weights", weights, ("expanded", "packed_experts", "packed"))
    _check_choice("engram_tables", engram_tables, ("memory", "mapped"))
    device = torch.device(device)
    checked = inspect_checkpoint(checkpoint_dir)
    check_form(checked, device.type, dtype, weights, engram_tables)
    model, quantized = checked.model, checked.model.config.quantized
    mapped = _table_names(model) if engram_tables == "mapped" else []
    for name in mapped if quantized else ():
        pack_table(model, name)
    if weights != "expanded":
        use_packed_modules(model, weights)
    allocate(model, device, dtype, mapped)
    map_tables(model, checked.stored, mapped)
    fill(model, checked.stored, quantized=quantized, mapped=mapped, progress=progress)
    model.cast(dtype)
    if checked.classes is not None:
        model.compressed_ids = checked.classes
    model.to(device)
    return model


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; must be one of {', '.join(allowed)}")


def check_form(
    checked: CheckedCheckpoint,
    device: str,
    dtype: torch.dtype,
    weights: WeightForm,
    engram_tables: Literal["memory", "mapped"],
) -> None:
    """Whether a checkpoint can lie in memory as `load_model` is asked to.

    Raises CheckpointError for floats that are to be packed and for tables of floats that are to
    stay mapped in another dtype than `dtype`; ValueError for mapped tables on another device than
    the CPU. Reads nothing.
    """
    quantized = checked.model.config.quantized
    if weights != "expanded" and not quantized:
        raise CheckpointError(
            f"{checked.directory}: weights is {weights!r}, but the checkpoint is stored as floats; "
            "must be 'expanded'"
        )
    if engram_tables != "mapped":
        return
    if device != "cpu":
        raise ValueError(f"engram_tables is 'mapped', which needs device cpu; device is {device}")
    for name in () if quantized else _table_names(checked.model):
        weight = checked.stored[f"{name}.weight"]
        if FLOAT_DTYPES[weight.dtype] != dtype:
            raise CheckpointError(
                f"{weight.path}: tensor {name}.weight is stored as {weight.dtype}; a table of "
                f"floats can stay mapped only in the model's dtype, which is {dtype}"
            )


def _table_names(model: DraftModel) -> list[str]:
    return [f"layers.{layer}.engram.embed" for layer in model.config.engram_layer_ids]


def check_checkpoint(checkpoint_dir: str | Path) -> ModelConfig:
    """Everything that `load_model` checks, without reading a weight or taking memory for one.

    Names, shapes and types of the tensors come from the headers of the files, and so do the lengths
    that the files must have. Raises CheckpointError for whatever is wrong with the directory.
    """
    return inspect_checkpoint(checkpoint_dir).model.config


def inspect_checkpoint(checkpoint_dir: str | Path) -> CheckedCheckpoint:
    """Everything that `check_checkpoint` finds on its way. Raises CheckpointError."""
    directory = checkpoint_path(checkpoint_dir)
    config = read_checkpoint_config(directory)
    stored = read_headers(directory)
    for name in ("n_routed_experts", "dspark_n_routed_experts", "num_hidden_layers"):
        # Before anything of that size is built: a count that the files cannot hold.
        if getattr(config, name) > len(stored):
            raise CheckpointError(
                f"{directory / 'config.json'}: text_config.{name} is {getattr(config, name)}, but "
                f"the checkpoint has {len(stored)} tensors in all"
            )
    check_tensors(stored, config, directory)
    with torch.device("meta"):
        model = DraftModel(config)
    classes = _read_token_classes(directory, config)
    return CheckedCheckpoint(directory, model, stored, classes)


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
    that does not describe the model or has a quantization_config, and for packed weights.
    """
    if dtype not in FLOAT_DTYPES.values():
        raise ValueError(f"dtype is {dtype}; must be torch.bfloat16, float32 or float64")
    if config_raw is None or parse_model_config(config_raw) != model.config:
        raise ValueError("config_raw does not describe the model that is saved")
    if model.config.quantized:
        raise ValueError("config_raw has a quantization_config; tensors are saved as floats")
    slots = tensor_slots(model)
    packed = next((slot.name for slot in slots if slot.scales is not None), None)
    if packed is not None:
        raise ValueError(f"{packed} is packed in the model; tensors are saved as floats")
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config_of_floats(config_raw, dtype))
    tensors = ((slot.name, float_tensor(slot, dtype)) for slot in slots)
    write_tensors(directory, tensors, max_shard_bytes)


def save_quantised(
    model: DraftModel,
    directory: Path,
    config_raw: dict[str, Any],
    *,
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Write the model in the released quantised format: config.json and tensors.

    Floats that the format quantises are rounded: each tile or block gets the smallest power of two
    that holds its largest magnitude. The others become BF16, the wide ones F32. Weights that are
    packed in the model are written as they are. `config_raw` is the parsed config.json that the
    model was built from; a quantization_config is added. Files and `max_shard_bytes` as in
    `save_model`. Raises ValueError for a config_raw that does not describe the model, for sizes
    that the format cannot hold, and for weights that are not finite.
    """
    if parse_model_config(config_raw) != model.config:
        raise ValueError("config_raw does not describe the model that is saved")
    quantised_raw = config_of_quantised(config_raw)
    parse_model_config(quantised_raw)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", quantised_raw)
    write_tensors(directory, _quantised_tensors(model), max_shard_bytes)


def _quantised_tensors(model: DraftModel) -> Iterator[tuple[str, Tensor]]:
    for slot in tensor_slots(model):
        kind = stored_kind(slot.name)
        if kind is StoredKind.FLOAT:
            yield slot.name, float_tensor(slot, torch.bfloat16)
            continue
        if slot.scales is not None:
            # Copies: a file's writer refuses tensors that share memory, as stacked experts do.
            codes, scales = (t.to("cpu", copy=True) for t in (slot.target, slot.scales))
            blocks = Blocks(codes, scales)
        else:
            blocks = quantise_weight(slot.name, slot.target.cpu())
        codes, scales = as_stored(kind, blocks)
        yield slot.name, codes
        yield scale_name(slot.name), scales


def quantise_weight(name: str, weight: Tensor) -> Blocks:
    """Stored bytes of the float weight that the checkpoint calls `name`.

    Raises ValueError, which names it, for values that are not finite.
    """
    try:
        return quantise(stored_kind(name), weight)
    except ValueError as error:
        raise ValueError(f"tensor {name}: {error}") from None


def float_tensor(slot: TensorSlot, dtype: torch.dtype) -> Tensor:
    """A copy of a slot's float on the CPU in the dtype in which a checkpoint of `dtype` has it."""
    wide = torch.promote_types(dtype, torch.float32)
    return slot.target.to("cpu", wide if slot.is_wide else dtype, copy=True).contiguous()


def config_of_floats(config_raw: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a checkpoint of floats: without quantisation, `dtype` as its dtype."""
    kept = {key: value for key, value in config_raw.items() if key != "quantization_config"}
    return {**kept, "dtype": str(dtype).removeprefix("torch.")}


def config_of_quantised(config_raw: dict[str, Any]) -> dict[str, Any]:
    """config.json of a checkpoint in the released quantised format."""
    return {**config_raw, "dtype": "bfloat16", "quantization_config": dict(QUANTIZATION_CONFIG)}


def _read_token_classes(directory: Path, config: ModelConfig) -> Tensor | None:
    """(vocab_size,) int64 Engram classes from tokenizer.json, or None without one.

    Ids that the tokenizer does not use take the class of the pad token.
    """
    path = directory / "tokenizer.json"
    if not config.engram_layer_ids or not path.is_file():
        return None
    try:
        text = read_small_file(path).decode("utf-8")
        classes = compressed_token_classes(Tokenizer.from_str(text))
    except CheckpointError:
        raise
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
