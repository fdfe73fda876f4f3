"""What a checkpoint directory holds next to what its config asks for, from headers alone.

Owns the comparison, which goes on after the first thing that is wrong: missing and mismatching
tensors are findings. Files without their data, and an index without its files, will do. Only what
leaves nothing to compare is an error.

Data flow: config.json, index and headers -> stored tensors -> findings and sums.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from decodegrid.graphs.checkpoint_files import (
    INDEX_FILE,
    SINGLE_FILE,
    read_json_object,
    read_weight_map,
)
from decodegrid.graphs.checkpoint_inventory import (
    MAX_TENSORS,
    StoredSpec,
    VisionConfig,
    num_tensors_bound,
    part_of,
    read_vision_config,
    released_tensors,
)
from decodegrid.graphs.checkpoint_names import (
    FLOAT_DTYPES,
    CheckpointError,
    is_vision_tensor,
    plain_name,
)
from decodegrid.graphs.model_config import ModelConfig, parse_model_config
from decodegrid.graphs.model_config_checks import ConfigFieldError
from decodegrid.graphs.safetensors_header import ITEM_BYTES, HeaderEntry, read_file_header

_JSON_DTYPES = {str(dtype).removeprefix("torch."): name for name, dtype in FLOAT_DTYPES.items()}
_NUM_EXAMPLES = 3

DataState = Literal["whole", "headers only", "index only"]
"""What of the tensor files is there: data, headers without any, or the index without a file."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of thing that is wrong."""

    what: str
    count: int
    examples: tuple[str, ...]
    """The first few, named."""


@dataclass(frozen=True, slots=True)
class StoredSums:
    """Bytes of the tensors that are stored, by two keys."""

    by_dtype: dict[str, int]
    by_part: dict[str, int]
    elements: dict[str, int]
    """Elements by dtype."""

    @property
    def total(self) -> int:
        return sum(self.by_dtype.values())


@dataclass(frozen=True, slots=True)
class Survey:
    """A checkpoint directory as it was found."""

    directory: Path
    raw: dict[str, Any]
    """The parsed config.json."""
    config: ModelConfig
    vision: VisionConfig | None
    """None where there is none, or none of its tensors is stored."""
    num_files: int
    num_tensors: int
    data: DataState
    present_bytes: int
    """Bytes of tensor data that the files really have."""
    sums: StoredSums
    """From the headers; with an index alone, as the config asks for them."""
    findings: tuple[Finding, ...]


@dataclass(slots=True)
class _Stored:
    """Tensors and files as they are read."""

    entries: dict[str, HeaderEntry | None]
    """By plain name; None where the file is not there."""
    num_files: int
    data: DataState
    present_bytes: int
    findings: list[Finding]


def survey_checkpoint(directory: Path) -> Survey:
    """Read config.json, the index and all headers of a directory, and compare.

    Raises CheckpointError for a directory that is not there or is no checkpoint, a config.json that
    cannot be run, and an index or header that cannot be read.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such checkpoint directory")
    raw = read_json_object(directory / "config.json")
    try:
        config, vision = parse_model_config(raw), read_vision_config(raw)
    except ConfigFieldError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    bound = num_tensors_bound(config, vision)
    if bound > MAX_TENSORS:
        raise CheckpointError(
            f"{directory / 'config.json'}: asks for up to {bound:,} tensors, above {MAX_TENSORS:,}"
        )
    stored = _read_stored(directory)
    if not any(is_vision_tensor(name) for name in stored.entries):
        vision = None  # a text-only copy keeps its vision_config
    float_dtype = _JSON_DTYPES.get(str(raw.get("dtype")), "BF16")
    try:
        specs = {spec.name: spec for spec in released_tensors(config, vision, float_dtype)}
    except ValueError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from None
    findings = [*stored.findings, *_compare(stored.entries, specs, vision)]
    return Survey(
        directory=directory,
        raw=raw,
        config=config,
        vision=vision,
        num_files=stored.num_files,
        num_tensors=len(stored.entries),
        data=stored.data,
        present_bytes=stored.present_bytes,
        sums=_sum(stored.entries, specs),
        findings=tuple(findings),
    )


def _read_stored(directory: Path) -> _Stored:
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if index.is_file() and single.is_file():
        raise CheckpointError(f"{directory}: has both {SINGLE_FILE} and {INDEX_FILE}; keep one")
    if not index.is_file() and not single.is_file():
        raise CheckpointError(
            f"{directory}: not a checkpoint: has neither {SINGLE_FILE} nor {INDEX_FILE}"
        )
    placed = read_weight_map(index) if index.is_file() else None
    names = [SINGLE_FILE] if placed is None else sorted(set(placed.values()))
    stored = _Stored({}, len(names), "whole", 0, [])
    absent, empty, cut, twice, elsewhere = [], [], [], [], []
    for name in names:
        if not (directory / name).is_file():
            absent.append(name)
            continue
        header = read_file_header(directory / name)
        stored.present_bytes += min(header.present_bytes, header.wanted_bytes)
        if header.present_bytes == 0 < header.wanted_bytes:
            empty.append(name)
        elif header.present_bytes != header.wanted_bytes:
            cut.append(f"{name} ({header.present_bytes:,} of {header.wanted_bytes:,} bytes)")
        for key, entry in header.entries.items():
            if plain_name(key) in stored.entries:
                twice.append(key)
            elif placed is not None and placed.get(key) != name:
                elsewhere.append(f"{key} in {name}")
            stored.entries[plain_name(key)] = entry
    if len(absent) == len(names):
        stored.data = "index only"
    elif len(absent) + len(empty) == len(names):
        stored.data = "headers only"
    unkept = []
    for key, name in (placed or {}).items():
        if plain_name(key) not in stored.entries:
            if name in absent:
                stored.entries[plain_name(key)] = None
            else:
                unkept.append(f"{key} in {name}")
    stored.findings += _findings(
        ("files that the index lists are missing", absent if stored.data != "index only" else []),
        ("files end with their header", empty if stored.data == "whole" else []),
        ("files have another length than their headers say", cut),
        ("tensors are stored twice", twice),
        ("tensors are where the index does not place them", elsewhere),
        ("tensors are not where the index places them", unkept),
    )
    return stored


def _findings(*lists: tuple[str, list[str]]) -> Iterator[Finding]:
    for what, names in lists:
        if names:
            yield Finding(what, len(names), tuple(names[:_NUM_EXAMPLES]))


def _compare(
    entries: dict[str, HeaderEntry | None],
    specs: dict[str, StoredSpec],
    vision: VisionConfig | None,
) -> Iterator[Finding]:
    """Names, shapes and dtypes; what is not there has neither shape nor dtype."""
    shapes, dtypes = [], []
    for name, spec in specs.items():
        entry = entries.get(name)
        if entry is None:
            continue
        if entry.shape != spec.shape:
            shapes.append(f"{name} {list(entry.shape)}, not {list(spec.shape)}")
        if entry.dtype not in spec.allowed:
            dtypes.append(f"{name} {entry.dtype}, not {' or '.join(spec.allowed)}")
    # Without a vision_config there is nothing to compare the image path with.
    unread = (name for name in entries if vision is None and is_vision_tensor(name))
    return _findings(
        ("tensors are missing", [name for name in specs if name not in entries]),
        ("tensors are unexpected", _without(entries, {*specs, *unread})),
        ("tensors have a wrong shape", shapes),
        ("tensors have a wrong dtype", dtypes),
    )


def _without(names: Iterable[str], known: set[str]) -> list[str]:
    return [name for name in names if name not in known]


def _sum(entries: dict[str, HeaderEntry | None], specs: dict[str, StoredSpec]) -> StoredSums:
    sums = StoredSums({}, {}, {})
    for name, entry in entries.items():
        if entry is None and name in specs:
            entry = _entry_of(specs[name])
        if entry is None:
            continue
        part = part_of(name)
        sums.by_dtype[entry.dtype] = sums.by_dtype.get(entry.dtype, 0) + entry.num_bytes
        sums.by_part[part] = sums.by_part.get(part, 0) + entry.num_bytes
        count = entry.num_bytes // ITEM_BYTES[entry.dtype]
        sums.elements[entry.dtype] = sums.elements.get(entry.dtype, 0) + count
    return sums


def _entry_of(spec: StoredSpec) -> HeaderEntry:
    """What the header of a file that is not there would say."""
    num_bytes = math.prod(spec.shape) * ITEM_BYTES[spec.dtype]
    return HeaderEntry(spec.dtype, spec.shape, num_bytes)
