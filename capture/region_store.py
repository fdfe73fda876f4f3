"""Compiled regions on disk, so that a second start neither traces nor compiles.

Owns the files of regions and of their kernels: in one directory for each set of facts that
generated code depends on, one JSON file for each region and variant, and one library for each
kernel, named by its checksum. Does not own what the facts are (start-up gives them), when code is
compiled (`decodegrid.capture.compile`) nor what else is in such a directory
(`decodegrid.capture.package`). Data flow: after a compilation the region's generated code, its
kernels' machine code and its `Binding` are saved; at the next start with equal facts they are
checked and loaded, without a compiler.

Two processes may save at once: a file is written beside its place and renamed into it. A damaged
file is not trusted: its region is compiled again, and `notes` says why.
"""

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from decodegrid.capture.binding import Binding
from decodegrid.capture.code_module import (
    CodeError,
    InnerFunction,
    extern_kernels,
    kernel_libraries,
    load_kernel,
    load_module,
    reduce_module,
)
from decodegrid.capture.code_paths import neutral_library
from decodegrid.capture.lowering import InnerCall

_FORMAT = 3
_DAMAGE = (
    AttributeError, IndexError, KeyError, RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
"""What reading a file of the wrong shape can raise; sympy's errors are ValueErrors."""
REGIONS, KERNELS = "regions", "kernels"
"""Folders of a directory."""


@dataclass(frozen=True, slots=True)
class StoredRegion:
    """One variant of a region: generated code and how it is called."""

    code: str
    """The whole module that the compiler wrote."""
    binding: Binding
    written: frozenset[int]
    """Indices of the innermost arguments that the code writes."""
    module: str = ""
    """What of the code a call needs; "" where only torch's own cache can load it."""
    kernels: Mapping[str, Path] = field(default_factory=dict)
    """Libraries by the names under which the module calls them."""

    def load(self) -> InnerFunction:
        """The innermost callable.

        Raises:
            CodeError: a library that the system does not load.
        """
        if not self.module:
            # Imported here: it brings the code generator with it.
            from torch._inductor.codecache import PyCodeCache

            call: InnerFunction = PyCodeCache.load(self.code).call
            return call
        kernels = {name: load_kernel(path, path.stem) for name, path in self.kernels.items()}
        return load_module(_compiled(self.module, "a stored region"), kernels)


def make_stored(call: InnerCall, binding: Binding) -> StoredRegion:
    """A compiled variant in the form that is kept, from its first call.

    Raises:
        CodeError: its kernels are not in libraries of their own, so that only torch's cache has
            them.
    """
    reduced = reduce_module(call.code, extern_kernels())
    kernels = kernel_libraries(call.function, reduced.kernels)
    return StoredRegion(call.code, binding, call.written, reduced.text, kernels)


class LoadedRegion:
    """A stored variant in this process; its code is loaded when a call first fits it."""

    __slots__ = ("_function", "stored")

    def __init__(self, stored: StoredRegion) -> None:
        self.stored = stored
        self._function: InnerFunction | None = None

    @property
    def is_used(self) -> bool:
        """Whether a call has fitted."""
        return self._function is not None

    @property
    def is_whole(self) -> bool:
        """Whether it loads without torch's own cache."""
        return bool(self.stored.module)

    @property
    def written(self) -> frozenset[int]:
        """Indices of the innermost arguments that are written."""
        return self.stored.written

    def bind(self, args: Sequence[Any]) -> list[Any] | None:
        """The innermost arguments of a call, or None where this variant does not fit it."""
        return self.stored.binding.bind(args)

    def call(self, inner: Sequence[Any]) -> InnerCall:
        """A call with arguments that `bind` gave."""
        stored = self.stored
        return InnerCall(self.function(), inner, inner, stored.written, stored.code)

    def function(self) -> InnerFunction:
        """The innermost callable; takes one list, which it may empty."""
        if self._function is None:
            self._function = self.stored.load()
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
        path: the directory of this set; None for the one of its key.
    """

    def __init__(self, directory: Path, facts: Mapping[str, str], path: Path | None = None) -> None:
        self._key = facts_key(facts)
        self.path = directory / f"regions-{self._key}" if path is None else path
        self.facts = dict(facts)
        self.notes: list[str] = []
        """What could not be used or written, one line each."""
        self.num_saved = 0
        """Variants that this process wrote."""
        self.variants: dict[str, dict[int, StoredRegion]] = {}
        """What this process loaded or compiled, by region and number."""

    def load(self, region: str, max_variants: int) -> list[StoredRegion]:
        """The stored variants of a region; what is damaged is left out and noted."""
        found = self.variants[region] = {}
        for index in range(max_variants):
            path = region_file(self.path, region, index)
            try:
                found[index] = self._read(path, region)
            except FileNotFoundError:
                continue
            except OSError as error:
                self.notes.append(f"{path}: {error}; compiled again")
            except _DAMAGE as error:
                self.notes.append(f"{path}: damaged ({error}); compiled again")
        return list(found.values())

    def keep(self, region: str, call: InnerCall, binding: Binding) -> None:
        """`save` what a compilation made, from its first call."""
        try:
            stored = make_stored(call, binding)
        except CodeError as error:
            self.notes.append(f"region {region!r} needs torch's cache to load: {error}")
            stored = StoredRegion(call.code, binding, call.written)
        self.save(region, stored)

    def save(self, region: str, stored: StoredRegion) -> None:
        """Write one more variant; a directory that refuses it is noted, not an error."""
        variants = self.variants.setdefault(region, {})
        index = next(number for number in range(len(variants) + 1) if number not in variants)
        variants[index] = stored
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with directory_lock(self.path):
                write_region(self.path, self._key, region, index, stored)
            self.num_saved += 1
        except OSError as error:
            self.notes.append(f"{region_file(self.path, region, index)}: not saved ({error})")

    def reject(self, region: str, variant: LoadedRegion, reason: str) -> None:
        """Leave out a stored variant that does not load, so that a new one takes its place."""
        self.notes.append(f"region {region!r}: {reason}; compiled again")
        variants = self.variants[region]
        for index in [i for i, stored in variants.items() if stored is variant.stored]:
            del variants[index]

    def write_to(self, path: Path) -> None:
        """Write every variant that this process loaded or compiled below another directory."""
        for region, variants in self.variants.items():
            for index, stored in variants.items():
                write_region(path, self._key, region, index, stored)

    def _read(self, path: Path, region: str) -> StoredRegion:
        text = path.read_text(encoding="utf-8")
        return _decode(text, (self._key, region), self.path / KERNELS)


def region_file(path: Path, region: str, index: int) -> Path:
    """Where a variant of a region is kept."""
    return path / REGIONS / f"{region}-{index}.json"


def write_region(path: Path, key: str, region: str, index: int, stored: StoredRegion) -> None:
    """Write a variant and its kernels; key: that of the facts. Raises OSError."""
    kernels = {}
    for name, library in stored.kernels.items():
        content = neutral_library(library)
        digest = hashlib.sha256(content).hexdigest()
        kernels[name] = digest
        target = path / KERNELS / f"{digest}.so"
        if not _has_content(target, digest):
            write_file(target, content)
    write_file(region_file(path, region, index), _encode(stored, (key, region), kernels).encode())


def write_file(path: Path, content: bytes) -> None:
    """Write a file beside its place and rename it into it, so that none is ever half there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(stream.fileno(), 0o644)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def directory_lock(path: Path) -> Iterator[None]:
    """Keep every other process that asks for the same directory waiting; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # which gives the lock back


def stored_kernels(text: str) -> set[str]:
    """Names of the libraries that a region's file refers to; raises what a file of the wrong
    shape can."""
    return {f"{digest}.so" for digest in json.loads(json.loads(text)["body"])["kernels"].values()}


def _has_content(path: Path, digest: str) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == digest
    except FileNotFoundError:
        return False


def _encode(stored: StoredRegion, owner: tuple[str, str], kernels: Mapping[str, str]) -> str:
    """owner: facts key and region name, so that a file in another's place is not taken."""
    body = {
        "owner": owner,
        "code": stored.code,
        "module": stored.module,
        "kernels": dict(kernels),
        "binding": stored.binding.as_json(),
        "written": sorted(stored.written),
    }
    text = json.dumps(body)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"format": _FORMAT, "sha256": digest, "body": text})


def _decode(text: str, owner: tuple[str, str], kernel_dir: Path) -> StoredRegion:
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
    _compiled(body["module"] or body["code"], region_file_name(owner))
    kernels = {}
    for name, digest in body["kernels"].items():
        library = kernel_dir / f"{digest}.so"
        if library.parent != kernel_dir or not name.isidentifier():
            raise ValueError(f"{digest} is no library of {name}")
        if not _has_content(library, digest):
            raise CodeError(f"{library.name} is missing or its checksum does not fit")
        kernels[name] = library
    return StoredRegion(body["code"], binding, written, body["module"], kernels)


def _compiled(text: str, name: str) -> CodeType:
    code: CodeType = compile(text, name, "exec")
    return code


def region_file_name(owner: tuple[str, str]) -> str:
    """A name for messages about a region's generated code."""
    return f"<generated code of region {owner[1]}>"
