"""Compiled regions on disk, so that a second start neither traces nor compiles.

Owns the files: one directory for each set of facts that generated code depends on, one JSON file
for each region and variant. Does not own what the facts are (start-up gives them) nor when code is
compiled (`decodegrid.capture.compile`). Data flow: after a compilation the region's generated code
and its `Binding` are saved; at the next start with equal facts they are loaded and checked.

Two processes may save at once: a file is written beside its place and renamed into it. A damaged
file is not trusted: its region is compiled again, and `notes` says why.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._inductor.codecache import PyCodeCache

from decodegrid.capture.binding import Binding
from decodegrid.capture.lowering import InnerCall

_FORMAT = 2
_DAMAGE = (
    AttributeError, IndexError, KeyError, RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
"""What reading a file of the wrong shape can raise; sympy's errors are ValueErrors."""


@dataclass(frozen=True, slots=True)
class StoredRegion:
    """One variant of a region: generated code and how it is called."""

    code: str
    binding: Binding
    written: frozenset[int]
    """Indices of the innermost arguments that the code writes."""

    def load(self) -> Callable[[list[Any]], object]:
        """The innermost callable. Kernels that torch's own cache still has are not built again."""
        call: Callable[[list[Any]], object] = PyCodeCache.load(self.code).call
        return call


class LoadedRegion:
    """A stored variant in this process; its code is loaded when a call first fits it."""

    __slots__ = ("_function", "_stored")

    def __init__(self, stored: StoredRegion) -> None:
        self._stored = stored
        self._function: Callable[[list[Any]], object] | None = None

    @property
    def is_used(self) -> bool:
        """Whether a call has fitted."""
        return self._function is not None

    @property
    def written(self) -> frozenset[int]:
        """Indices of the innermost arguments that are written."""
        return self._stored.written

    def bind(self, args: Sequence[Any]) -> list[Any] | None:
        """The innermost arguments of a call, or None where this variant does not fit it."""
        return self._stored.binding.bind(args)

    def call(self, inner: Sequence[Any]) -> InnerCall:
        """A call with arguments that `bind` gave."""
        stored = self._stored
        return InnerCall(self.function(), inner, inner, stored.written, stored.code)

    def function(self) -> Callable[[list[Any]], object]:
        """The innermost callable; takes one list, which it may empty."""
        if self._function is None:
            self._function = self._stored.load()
        return self._function


def facts_key(facts: Mapping[str, str]) -> str:
    """Name of a set of facts: equal sets, equal names."""
    text = json.dumps(dict(sorted(facts.items())))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RegionStore:
    """Stored regions under one set of facts.

    Args:
        directory: where the directories of all sets are.
        facts: everything that generated code depends on beside the arguments: code, versions,
            model, sizes.
    """

    def __init__(self, directory: Path, facts: Mapping[str, str]) -> None:
        self.path = directory / f"regions-{facts_key(facts)}"
        self.facts = dict(facts)
        self.notes: list[str] = []
        """What could not be used or written, one line each."""
        self._key = facts_key(facts)
        self._taken: dict[str, set[int]] = {}

    def load(self, region: str, max_variants: int) -> list[StoredRegion]:
        """The stored variants of a region; what is damaged is left out and noted."""
        found = []
        taken = self._taken.setdefault(region, set())
        for index in range(max_variants):
            path = self._file(region, index)
            try:
                found.append(_decode(path.read_text(encoding="utf-8"), (self._key, region)))
                taken.add(index)
            except FileNotFoundError:
                continue
            except OSError as error:
                self.notes.append(f"{path}: {error}; compiled again")
            except _DAMAGE as error:
                self.notes.append(f"{path}: damaged ({error}); compiled again")
        return found

    def save(self, region: str, stored: StoredRegion) -> None:
        """Write one more variant; a directory that refuses it is noted, not an error."""
        taken = self._taken.setdefault(region, set())
        index = next(number for number in range(len(taken) + 1) if number not in taken)
        taken.add(index)
        path = self._file(region, index)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write(self.path / "manifest.json", json.dumps(self.facts, indent=1) + "\n")
            self._write(path, _encode(stored, (self._key, region)))
        except OSError as error:
            self.notes.append(f"{path}: not saved ({error})")

    def _file(self, region: str, index: int) -> Path:
        return self.path / f"{region}-{index}.json"

    def _write(self, path: Path, text: str) -> None:
        descriptor, name = tempfile.mkstemp(dir=self.path, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


def _encode(stored: StoredRegion, owner: tuple[str, str]) -> str:
    """owner: facts key and region name, so that a file in another's place is not taken."""
    body = {
        "owner": owner,
        "code": stored.code,
        "binding": stored.binding.as_json(),
        "written": sorted(stored.written),
    }
    text = json.dumps(body)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"format": _FORMAT, "sha256": digest, "body": text})


def _decode(text: str, owner: tuple[str, str]) -> StoredRegion:
    outer = json.loads(text)
    if outer["format"] != _FORMAT or outer["format"] is True:
        raise ValueError(f"format is {outer['format']}, not {_FORMAT}")
    if hashlib.sha256(outer["body"].encode()).hexdigest() != outer["sha256"]:
        raise ValueError("its checksum does not fit")
    body = json.loads(outer["body"])
    if tuple(body["owner"]) != owner:
        raise ValueError(f"it is of {body['owner']}, not of {list(owner)}")
    binding = Binding.from_json(body["binding"])
    written = frozenset(body["written"])
    if not written <= set(range(len(binding.inputs))):
        raise ValueError(f"it writes arguments {sorted(written)} of {len(binding.inputs)}")
    compile(body["code"], region_file_name(owner), "exec")
    return StoredRegion(body["code"], binding, written)


def region_file_name(owner: tuple[str, str]) -> str:
    """A name for messages about a region's generated code."""
    return f"<generated code of region {owner[1]}>"
