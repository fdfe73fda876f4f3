"""Whether the stored tensors of a checkpoint are the ones that its config asks for.

Owns the comparison of the headers with the inventory; the first difference becomes one
CheckpointError. Reads headers only and builds no module, so that a config that asks for more than
any memory holds is refused like any other that does not fit its files.

Data flow: config -> expected tensors -> compared with what `read_headers` found.
"""

from pathlib import Path

from decodegrid.graphs.checkpoint_files import StoredTensor
from decodegrid.graphs.checkpoint_inventory import StoredSpec, released_tensors
from decodegrid.graphs.checkpoint_names import CheckpointError, is_vision_tensor
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.quant_layout import CODE_DTYPES, SCALE_DTYPE

_QUANTISED_DTYPES = frozenset((SCALE_DTYPE, *(d for names in CODE_DTYPES.values() for d in names)))


def check_tensors(stored: dict[str, StoredTensor], config: ModelConfig, directory: Path) -> None:
    """Raise CheckpointError for the first stored tensor that is unexpected, of another dtype or of
    another shape, and then for the first one that is missing. Image tensors are let through.
    """
    wanted = {spec.name: spec for spec in released_tensors(config, None)}
    for name, tensor in stored.items():
        expected = wanted.get(name)
        if expected is not None:
            _check_header(tensor, name, expected, config.quantized)
        elif not is_vision_tensor(name):
            hint = _scale_hint(name, wanted, config.quantized)
            raise CheckpointError(f"{tensor.path}: unexpected tensor {name}{hint}")
    missing = [name for name in wanted if name not in stored]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{directory}: tensor {missing[0]}{more} missing")


def _scale_hint(name: str, wanted: dict[str, StoredSpec], quantized: bool) -> str:
    weight = name.removesuffix(".scale") + ".weight"
    if not name.endswith(".scale") or weight not in wanted:
        return ""
    if quantized:
        return f"; {weight} is not quantised in this format"
    return "; config.json has no quantization_config, so weights are floats"


def _check_header(tensor: StoredTensor, name: str, expected: StoredSpec, quantized: bool) -> None:
    if tensor.dtype not in expected.allowed:
        *most, last = expected.allowed
        allowed = f"{', '.join(most)} or {last}" if most else last
        hint = ""
        if quantized and expected.dtype in _QUANTISED_DTYPES:
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
