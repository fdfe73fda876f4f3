"""Checkpoint to checkpoint: floats to the released quantised format, and back.

Owns the way from one directory of files to another, weight by weight and without a model in memory,
and the measurement of what the conversion changed. The result appears under its name when it is
whole (graphs/whole_directory.py).

Data flow: checked headers of the source -> each weight, read and converted -> shards of the
target; the differences of the values -> one `KindReport` for each stored kind.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from decodegrid.graphs.checkpoint import (
    CheckedCheckpoint,
    config_of_floats,
    config_of_quantised,
    inspect_checkpoint,
    quantise_weight,
)
from decodegrid.graphs.checkpoint_files import (
    INDEX_FILE,
    ShardReader,
    read_json_object,
    read_small_file,
    write_json,
    write_tensors,
)
from decodegrid.graphs.checkpoint_fill import by_file, read_quantised
from decodegrid.graphs.checkpoint_names import (
    FLOAT_DTYPES,
    CheckpointError,
    TensorSlot,
    is_vision_tensor,
    tensor_slots,
)
from decodegrid.graphs.model_config import parse_model_config
from decodegrid.graphs.model_config_checks import ConfigFieldError
from decodegrid.graphs.quant_layout import (
    StoredKind,
    as_stored,
    expand_into,
    expand_piece,
    piece_scales,
    row_pieces,
    scale_name,
    stored_kind,
)
from decodegrid.graphs.whole_directory import appears_whole, check_target

StoredForm = Literal["fp8", "bf16", "f32"]
"""What a checkpoint stores: the released quantised format, or floats."""

_FLOAT_FORMS = {"bf16": "BF16", "f32": "F32"}
_CONFIG_FILE = "config.json"


@dataclass(slots=True)
class KindReport:
    """What the conversion did to the weights of one stored kind."""

    kind: str
    tensors: int = 0
    """Weights; scales are not counted apart."""
    bytes_before: int = 0
    bytes_after: int = 0
    """With scales."""
    max_error: float = 0.0
    """Largest change of a value."""
    square_error: float = 0.0
    """Sum of the squared changes."""
    square: float = 0.0
    """Sum of the squared values of the source."""

    @property
    def relative_rms_error(self) -> float:
        """Root mean square of the changes, over that of the source's values."""
        return (self.square_error / self.square) ** 0.5 if self.square else 0.0

    def compare(self, source: Tensor, result: Tensor) -> None:
        """Add the changes of one piece of a weight."""
        wide, change = source.double(), result.double() - source.double()
        if change.numel():
            self.max_error = max(self.max_error, float(change.abs().amax()))
        self.square_error += float(change.square().sum())
        self.square += float(wide.square().sum())


def convert_checkpoint(
    source_dir: str | Path,
    target_dir: str | Path,
    to: StoredForm | None = None,
    *,
    max_shard_bytes: int = 4 * 2**30,
    progress: bool = False,
) -> list[KindReport]:
    """Write the checkpoint `source_dir` (a directory, or "tiny") as `target_dir` in another form.

    to: "fp8" is the released quantised format; None means "fp8" for a checkpoint of floats and
    "bf16" for a quantised one. Image tensors, tokenizer.json and the other JSON files are copied.
    `target_dir` must be absent or empty; until everything is written, it holds at most a hidden
    directory, which a failure takes along. Needs memory for one shard of the target. progress: draw
    a bar on standard error. Returns what changed, by stored kind.

    Raises CheckpointError for a source that cannot be read, and ValueError for a target that cannot
    be written, for a form that the source already has and for weights that cannot be quantised.
    """
    checked = inspect_checkpoint(source_dir)
    form = _target_form(checked, to)
    raw = read_json_object(checked.directory / _CONFIG_FILE)
    raw = (
        config_of_quantised(raw)
        if form == "fp8"
        else config_of_floats(raw, FLOAT_DTYPES[_FLOAT_FORMS[form]])
    )
    try:
        parse_model_config(raw)
    except ConfigFieldError as error:
        raise ValueError(f"{checked.directory} cannot be stored as {form}: {error}") from None
    target = check_target(checked.directory, Path(target_dir))
    conversion = _Conversion(checked, form)
    with appears_whole(target, last=_CONFIG_FILE) as directory:
        # First, since what cannot be copied is found in no time.
        for path in sorted(checked.directory.glob("*.json")):
            if path.name not in (_CONFIG_FILE, INDEX_FILE):
                (directory / path.name).write_bytes(read_small_file(path))
        write_json(directory / _CONFIG_FILE, raw)
        total = sum(tensor.nbytes for tensor in checked.stored.values())
        with tqdm(
            total=total, unit="B", unit_scale=True, desc="converting", disable=not progress
        ) as bar:
            write_tensors(directory, conversion.tensors(bar.update), max_shard_bytes)
    return list(conversion.reports.values())


def _target_form(checked: CheckedCheckpoint, to: StoredForm | None) -> StoredForm:
    """The form to write; ValueError where the source has it already."""
    quantized = checked.model.config.quantized
    form = to or ("bf16" if quantized else "fp8")
    if form not in ("fp8", *_FLOAT_FORMS):
        raise ValueError(f"to is {form!r}; must be fp8, bf16 or f32")
    if form == "fp8":
        same = quantized
    else:
        narrow = [slot.name for slot in tensor_slots(checked.model) if not slot.is_wide]
        same = not quantized and all(
            checked.stored[name].dtype == _FLOAT_FORMS[form] for name in narrow
        )
    if same:
        raise ValueError(f"{checked.directory} is stored as {form} already")
    return form


class _Conversion:
    """One pass over a source's weights."""

    def __init__(self, checked: CheckedCheckpoint, form: StoredForm) -> None:
        self.stored = checked.stored
        self.slots = tensor_slots(checked.model)
        self.quantized = checked.model.config.quantized
        self.form = form
        self.reports: dict[str, KindReport] = {}

    def tensors(self, advance: Callable[[float], object]) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the target, one weight at a time; fills `reports` on the way."""
        for slot, reader in by_file(self.slots, self.stored):
            kind = stored_kind(slot.name)
            names = [slot.name]
            if self.quantized and kind is not StoredKind.FLOAT:
                names.append(scale_name(slot.name))
            label = "wide float" if slot.is_wide else kind.value
            report = self.reports.setdefault(label, KindReport(label))
            report.tensors += 1
            read = sum(self.stored[name].nbytes for name in names)
            report.bytes_before += read
            for name, tensor in self._convert(slot, kind, reader, report):
                report.bytes_after += tensor.nbytes
                yield name, tensor
            advance(read)
        yield from self._image_tensors(advance)

    def _convert(
        self, slot: TensorSlot, kind: StoredKind, reader: ShardReader, report: KindReport
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one weight in the target's form."""
        if kind is not StoredKind.FLOAT and self.quantized:
            yield slot.name, self._expanded(slot, kind, reader, report)
            return
        weight = reader.get(self.stored[slot.name])
        if kind is StoredKind.FLOAT or self.form != "fp8":
            result = weight.to(self._float_dtype(slot), copy=True)
            rows = weight.reshape(-1, weight.shape[-1])
            for start, stop in row_pieces(*rows.shape):
                report.compare(rows[start:stop], result.view_as(rows)[start:stop])
            yield slot.name, result
            return
        try:
            blocks = quantise_weight(slot.name, weight)
        except ValueError as error:
            raise CheckpointError(f"{self.stored[slot.name].path}: {error}") from None
        for start, stop in row_pieces(*weight.shape):
            scales = piece_scales(kind, blocks.scales, start, stop)
            values = expand_piece(kind, blocks.codes[start:stop], scales)
            report.compare(weight[start:stop], values)
        codes, scales = as_stored(kind, blocks)
        yield slot.name, codes
        yield scale_name(slot.name), scales

    def _expanded(
        self, slot: TensorSlot, kind: StoredKind, reader: ShardReader, report: KindReport
    ) -> Tensor:
        codes, scales = read_quantised(slot.name, self.stored, reader)
        result = torch.empty(slot.target.shape, dtype=self._float_dtype(slot))
        expand_into(kind, codes, scales, result)
        for start, stop in row_pieces(*result.shape):
            piece = piece_scales(kind, scales, start, stop)
            report.compare(expand_piece(kind, codes[start:stop], piece), result[start:stop])
        return result

    def _float_dtype(self, slot: TensorSlot) -> torch.dtype:
        """Dtype in which the target stores a float."""
        return torch.float32 if slot.is_wide or self.form == "f32" else torch.bfloat16

    def _image_tensors(self, advance: Callable[[float], object]) -> Iterator[tuple[str, Tensor]]:
        reader = ShardReader()
        report = KindReport("image path, copied")
        for name, tensor in self.stored.items():
            if is_vision_tensor(name):
                report.tensors += 1
                report.bytes_before += tensor.nbytes
                report.bytes_after += tensor.nbytes
                yield name, reader.get(tensor)
                advance(tensor.nbytes)
        if report.tensors:
            self.reports[report.kind] = report
