"""The header of a safetensors file, read without its data.

Owns the reading of files that may be cut off anywhere behind their header, as header-only copies of
large checkpoints are; loading goes through the safetensors library, which wants whole files. Reads
the first bytes of a file, never a tensor.

Data flow: file -> length and JSON -> name, dtype, shape and bytes of every tensor.

Source: safetensors file format (8 bytes of little-endian length, JSON, data).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from decodegrid.configs.strict_json import unique_keys
from decodegrid.graphs.checkpoint_names import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""Longest header that is read, as in the safetensors library."""

ITEM_BYTES = MappingProxyType(
    {
        **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
        **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
        **dict.fromkeys(("I32", "U32", "F32"), 4),
        **dict.fromkeys(("I64", "U64", "F64"), 8),
    }
)
"""Bytes of an element by its safetensors dtype."""

_MAX_BYTES = 2**63
_MAX_AXES = 8
"""Of a tensor here; a shape of a million large axes would take minutes to multiply."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor as the header states it."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What a safetensors file says it holds."""

    path: Path
    entries: dict[str, HeaderEntry]
    """By stored name."""
    wanted_bytes: int
    """Data that the entries ask for."""
    present_bytes: int
    """Data that the file has behind its header."""


def read_file_header(path: Path) -> FileHeader:
    """Header of the file at `path`; its data may be missing.

    Raises CheckpointError, naming the file, for one that cannot be read, whose header does not lie
    within it or is no such JSON, or whose entries contradict themselves.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8:
                raise CheckpointError(f"{path}: has {size} bytes; a safetensors file begins with 8")
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: the header's length is {length} bytes; the file has {size - 8} "
                    f"behind it, and at most {MAX_HEADER_BYTES} are read"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        raw = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: the header must hold a JSON object")
    _check_metadata(path, raw.pop("__metadata__", {}))
    places = {name: _read_entry(path, name, value) for name, value in raw.items()}
    end = 0
    for name, (begin, entry) in sorted(places.items(), key=_offset):
        if begin != end:
            raise CheckpointError(
                f"{path}: tensor {name} begins at byte {begin} of the data; the one before it ends "
                f"at {end}"
            )
        end += entry.num_bytes
    entries = {name: entry for name, (_, entry) in places.items()}
    return FileHeader(path, entries, end, size - 8 - length)


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must be an object of texts")


def _offset(item: tuple[str, tuple[int, HeaderEntry]]) -> tuple[int, int]:
    """Order of the data; an empty tensor comes before the one that begins at the same byte."""
    _, (begin, entry) = item
    return begin, entry.num_bytes


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_BYTES


def _read_entry(path: Path, name: str, raw: Any) -> tuple[int, HeaderEntry]:
    """First byte and entry of one tensor."""

    def bad(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name}: {what}")

    if not isinstance(raw, dict):
        raise bad("the header entry must be a JSON object")
    dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise bad(f"dtype is {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > _MAX_AXES or not all(map(_is_count, shape)):
        raise bad(f"shape is {shape!r:.100}; must be a list of at most {_MAX_AXES} counts")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise bad(f"data_offsets is {offsets!r:.100}; must be two counts")
    begin, end = offsets
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != num_bytes:
        raise bad(
            f"data_offsets {offsets} span {end - begin} bytes; {dtype} {shape} takes {num_bytes}"
        )
    return begin, HeaderEntry(dtype, tuple(shape), num_bytes)
