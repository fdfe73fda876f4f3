"""Safetensors files of a checkpoint directory: headers in, shards out.

Owns the two layouts (`model.safetensors`, or shards with `model.safetensors.index.json`), and the
checks that need no model: readable headers, no tensor twice, index and shards agree. Files are
written next to their final name and renamed, so that a reader never sees half a file.

Data flow: directory -> name, file, dtype and shape of every tensor; one tensor at a time as a view
of its mapped file; tensors -> directory.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from decodegrid.configs.strict_json import unique_keys
from decodegrid.graphs.checkpoint_names import CheckpointError, plain_name
from decodegrid.graphs.safetensors_header import ITEM_BYTES, read_file_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARDS = "model-*-of-*.safetensors"
MAX_TEXT_BYTES = 100_000_000
"""Longest JSON file that is read; the released model's index has 8 million bytes."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Header entry of one tensor."""

    path: Path
    stored_name: str
    dtype: str
    """Safetensors name: "BF16", "F32", "F8_E4M3", ..."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


# A file that the address space has no room for is a MemoryError, or torch's RuntimeError.
_UNREADABLE = (SafetensorError, OSError, RuntimeError, MemoryError)


def _open_shard(path: Path) -> Any:
    """An open safetensors file on the CPU; what is wrong with it becomes a CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except _UNREADABLE as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from None


class ShardReader:
    """Tensors of a checkpoint's files; each file is mapped at its first tensor.

    What `get` returns is a view of the file's private mapping, which costs memory only where it is
    read, and keeps the mapping alive for as long as the tensor lives.
    """

    def __init__(self) -> None:
        self._shards: dict[Path, Any] = {}

    def get(self, tensor: StoredTensor) -> Tensor:
        """The tensor as a read-only view; raises CheckpointError if its file cannot be read."""
        if tensor.path not in self._shards:
            self._shards[tensor.path] = _open_shard(tensor.path)
        try:
            return self._shards[tensor.path].get_tensor(tensor.stored_name)
        except _UNREADABLE as error:
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.stored_name} cannot be read: {error}"
            ) from None

    def close(self) -> None:
        """Unmap all files but those that a tensor still views."""
        self._shards.clear()


def read_small_file(path: Path) -> bytes:
    """What a file beside the tensors holds.

    Raises CheckpointError for one that is absent, is no regular file (a pipe would be waited for)
    or is too long to be meant, and OSError for one that cannot be read.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file")
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a regular file")
    with path.open("rb") as file:
        data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise CheckpointError(f"{path}: is longer than {MAX_TEXT_BYTES} bytes")
    return data


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or a CheckpointError that names the file."""
    data = read_small_file(path)
    try:
        raw = json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds {type(raw).__name__}")
    return raw


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Every stored tensor by its plain name; reads headers only.

    Raises CheckpointError for a missing file, a bad or truncated file, a tensor stored twice, and
    an index that does not agree with its shards.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if index.is_file() and single.is_file():
        raise CheckpointError(f"{directory}: has both {SINGLE_FILE} and {INDEX_FILE}; keep one")
    placed = read_weight_map(index) if index.is_file() else None
    names = [SINGLE_FILE] if placed is None else sorted(set(placed.values()))
    for name in names if placed is not None else ():
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / name}: no such file; {INDEX_FILE} lists it")
    found: dict[str, StoredTensor] = {}
    for name in names:
        for key, tensor in _read_header(directory / name):
            if key in found:
                raise CheckpointError(
                    f"{tensor.path}: tensor {key} is stored twice, also in {found[key].path}"
                )
            if placed is not None and placed.pop(tensor.stored_name, None) != name:
                raise CheckpointError(
                    f"{tensor.path}: tensor {tensor.stored_name} is not placed here by {INDEX_FILE}"
                )
            found[key] = tensor
    if placed:
        key, name = min(placed.items())
        raise CheckpointError(f"{directory / name}: tensor {key} is missing; {INDEX_FILE} lists it")
    return found


def read_weight_map(path: Path) -> dict[str, str]:
    """File name of each stored name in an index; CheckpointError for what is no index."""
    placed = read_json_object(path).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{path}: weight_map must be a non-empty object")
    known: set[str] = set()
    for key, name in placed.items():
        if not isinstance(name, str) or (name not in known and not _is_file_name(name)):
            raise CheckpointError(f"{path}: weight_map places {key} in {name!r}, not a file name")
        known.add(name)
    return placed


def _is_file_name(name: str) -> bool:
    """Whether `name` alone names a file: an index must not lead out of its directory."""
    return name.isprintable() and name not in ("", "..") and Path(name).name == name


def _read_header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    _open_shard(path)  # for the library's own checks: tensors are read through it
    # The library takes the last of two entries of one name; here that is an error.
    for stored_name, entry in sorted(read_file_header(path).entries.items()):
        yield plain_name(stored_name), StoredTensor(path, stored_name, entry.dtype, entry.shape)


def write_tensors(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> None:
    """Write named CPU tensors as one file, or as shards with an index above the limit.

    Holds one shard in memory at a time, since `tensors` may be made while they are written. A
    tensor is never split. Leftovers of an earlier checkpoint in `directory` are removed. Raises
    ValueError, which names the file, where one cannot be written.
    """
    parts: list[tuple[Path, list[str]]] = []
    total = 0

    def flush(shard: dict[str, Tensor]) -> None:
        path = directory / f".{SINGLE_FILE}.part{len(parts)}"
        path.touch()
        mode = path.stat().st_mode  # what the umask allows; save_file leaves a private file
        try:
            save_file(shard, path)
        except SafetensorError as error:  # a full disk; the library has no OSError for it
            raise ValueError(f"{path}: cannot be written: {error}") from None
        path.chmod(mode)
        parts.append((path, list(shard)))

    shard: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors:
        if shard and filled + tensor.nbytes > max_shard_bytes:
            flush(shard)
            shard, filled = {}, 0
        shard[name] = tensor
        filled += tensor.nbytes
        total += tensor.nbytes
    flush(shard)
    for old in (directory / SINGLE_FILE, directory / INDEX_FILE, *directory.glob(_SHARDS)):
        if len(parts) > 1 or old.name != SINGLE_FILE:
            old.unlink(missing_ok=True)
    if len(parts) == 1:
        os.replace(parts[0][0], directory / SINGLE_FILE)
        return
    placed: dict[str, str] = {}
    for number, (path, names) in enumerate(parts, 1):
        final = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        os.replace(path, directory / final)
        placed.update(dict.fromkeys(names, final))
    write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": placed})


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as indented JSON under its final name in one move."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, path)
