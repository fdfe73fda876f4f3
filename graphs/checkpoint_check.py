"""Whether the stored tensors of a checkpoint are the ones that its config asks for.

Owns the expected names, dtypes and shapes of a float and of a quantised checkpoint, and the
comparison with the headers; the first difference becomes one CheckpointError. Reads headers only.

Data flow: slots of a float model (which may be without memory) -> expected tensors -> compared with
what `read_headers` found.

Source: safetensors inventory of deepseek-ai/DeepSeek-V4.1-Flash.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from decodegrid.graphs.checkpoint_files import StoredTensor
from decodegrid.graphs.checkpoint_names import (
    FLOAT_DTYPES,
    CheckpointError,
    TensorSlot,
    is_vision_tensor,
)
from decodegrid.graphs.quant_layout import (
    CODE_DTYPES,
    SCALE_DTYPE,
    StoredKind,
    scale_name,
    stored_kind,
    stored_shapes,
)

_QUANTISED_DTYPES = frozenset((SCALE_DTYPE, *(d for names in CODE_DTYPES.values() for d in names)))


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """One tensor that a checkpoint must hold."""

    name: str
    dtypes: tuple[str, ...]
    """Safetensors names of the dtypes that it may have."""
    shape: tuple[int, ...]


def expected_tensors(slots: Sequence[TensorSlot], *, quantized: bool) -> Iterator[ExpectedTensor]:
    """Tensors of a checkpoint, from the slots of a model of floats, in their order.

    quantized: whether the config has a quantization_config. Raises ValueError for a shape that a
    quantised format cannot hold.
    """
    for slot in slots:
        kind = stored_kind(slot.name) if quantized else StoredKind.FLOAT
        shape = tuple(slot.target.shape)
        if kind is StoredKind.FLOAT:
            wide = tuple(name for name in FLOAT_DTYPES if name != "BF16" or not slot.is_wide)
            yield ExpectedTensor(slot.name, wide, shape)
            continue
        codes, scales = stored_shapes(kind, shape)
        yield ExpectedTensor(slot.name, CODE_DTYPES[kind], codes)
        yield ExpectedTensor(scale_name(slot.name), (SCALE_DTYPE,), scales)


def check_tensors(
    stored: dict[str, StoredTensor],
    slots: Sequence[TensorSlot],
    directory: Path,
    *,
    quantized: bool,
) -> None:
    """Raise CheckpointError for the first stored tensor that is unexpected, of another dtype or of
    another shape, and then for the first one that is missing. Image tensors are let through.
    """
    wanted = {tensor.name: tensor for tensor in expected_tensors(slots, quantized=quantized)}
    for name, tensor in stored.items():
        expected = wanted.get(name)
        if expected is not None:
            _check_header(tensor, name, expected, quantized)
        elif not is_vision_tensor(name):
            raise CheckpointError(
                f"{tensor.path}: unexpected tensor {name}{_scale_hint(name, wanted, quantized)}"
            )
    missing = [name for name in wanted if name not in stored]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{directory}: tensor {missing[0]}{more} missing")


def _scale_hint(name: str, wanted: dict[str, ExpectedTensor], quantized: bool) -> str:
    weight = name.removesuffix(".scale") + ".weight"
    if not name.endswith(".scale") or weight not in wanted:
        return ""
    if quantized:
        return f"; {weight} is not quantised in this format"
    return "; config.json has no quantization_config, so weights are floats"


def _check_header(
    tensor: StoredTensor, name: str, expected: ExpectedTensor, quantized: bool
) -> None:
    if tensor.dtype not in expected.dtypes:
        *most, last = expected.dtypes
        allowed = f"{', '.join(most)} or {last}" if most else last
        hint = ""
        if quantized and expected.dtypes[0] in _QUANTISED_DTYPES:
            hint = " (config.json has a quantization_config)"
        elif not quantized and tensor.dtype in _QUANTISED_DTYPES:
            hint = " (config.json has no quantization_config)"
        raise CheckpointError(
            f"{tensor.path}: tensor {name} has dtype {tensor.dtype}; must be {allowed}{hint}"
        )
    if tensor.shape != expected.shape:
        raise CheckpointError(
            f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}; config.json asks "
            f"for {list(expected.shape)}"
        )
