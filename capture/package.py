"""A capture package: one directory from which a deployment starts without compiling anything.

Owns its form: the manifest with every factor of its key and the checksum of every file, the folders
beside it, and how a directory is checked. Does not own how regions are kept
(`decodegrid.capture.region_store`), how a package takes another's place
(`decodegrid.capture.package_swap`) nor what a start does with it. Data flow: folders that were
filled -> `seal_package` -> manifest; `read_manifest` and `checked_file` the other way.

A directory of compiled regions in a cache has the same form.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from decodegrid.capture.region_store import (
    KERNELS,
    REGIONS,
    directory_lock,
    stored_kernels,
    write_file,
)
from decodegrid.configs.strict_json import load_json

MANIFEST = "manifest.json"
NATIVE, SURFACES = "native", "surfaces"
FOLDERS = (REGIONS, KERNELS, NATIVE, SURFACES)
"""Compiled regions, the libraries of their kernels, the native library, step-time surfaces."""
_PATTERNS = (
    f"{REGIONS}/*.json", f"{KERNELS}/*.so", f"{NATIVE}/*.so", f"{SURFACES}/surface-*.json", "*.json"
)  # fmt: skip


class PackageError(ValueError):
    """A directory that is no package, one of another deployment, or one that cannot be written."""


class DamagedManifestError(PackageError):
    """A manifest that cannot be trusted."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


class PackageFile(_Part):
    """One file of a package."""

    name: Annotated[str, Field(min_length=1)]
    """Relative to the package, with "/" between its parts."""
    bytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(_Part):
    """What a package is of, and what is in it."""

    format: Literal[1] = 1
    facts: dict[str, str]
    """Every factor of the key with its value."""
    pairs: list[list[PositiveInt]]
    """Captured [requests, query tokens]."""
    prefill_chunk_sizes: list[PositiveInt]
    variants: list[str]
    """Of the captured steps."""
    versions: dict[str, str]
    files: list[PackageFile]

    def file(self, name: str) -> PackageFile | None:
        """The entry of a file; None where there is none."""
        return next((entry for entry in self.files if entry.name == name), None)

    def names(self, folder: str) -> list[str]:
        """The files in a folder, with it."""
        return [entry.name for entry in self.files if entry.name.startswith(f"{folder}/")]


@dataclass(frozen=True, slots=True)
class PackageLabel:
    """What a manifest says beside the files."""

    facts: Mapping[str, str]
    pairs: Sequence[tuple[int, int]]
    prefill_chunk_sizes: Sequence[int]
    variants: Sequence[str]
    versions: Mapping[str, str]


def read_manifest(path: Path) -> Manifest:
    """The manifest of a package directory.

    Raises:
        DamagedManifestError: it is not what was written.
        PackageError: the directory is no package, or of another version of this program.
    """
    place = path / MANIFEST
    try:
        text = place.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        what = f"it has no {MANIFEST}" if path.is_dir() else "there is no such directory"
        raise PackageError(f"{path} is no package: {what}") from None
    except UnicodeDecodeError:
        raise DamagedManifestError(f"{place} is damaged: it is no text") from None
    except OSError as error:
        raise PackageError(f"cannot read {place}: {error.strerror}") from error
    try:
        outer = load_json(text)
        body, digest = outer["manifest"], outer["sha256"]
        whole = _digest(_dump(body).encode()) == digest
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedManifestError(f"{place} is damaged: {error}") from None
    if not whole:
        raise DamagedManifestError(f"{place} is damaged: its checksum does not fit")
    try:
        return Manifest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise PackageError(f"{place}: {field}: {first['msg']}, got {first['input']!r}") from None


def checked_file(path: Path, manifest: Manifest, name: str) -> Path:
    """A file of a package, if it is what the manifest says.

    Raises:
        PackageError: it is not listed, missing, or its checksum does not fit.
    """
    entry, place = manifest.file(name), path / name
    if entry is None:
        raise PackageError(f"{place} is not in the manifest")
    try:
        content = place.read_bytes()
    except OSError as error:
        raise PackageError(f"{place}: {error.strerror}") from None
    if len(content) != entry.bytes or _digest(content) != entry.sha256:
        raise PackageError(f"{place}: damaged (its checksum does not fit)")
    return place


def seal_package(path: Path, label: PackageLabel) -> Manifest:
    """Write the manifest of a directory whose folders are filled, and remove the libraries that no
    region refers to any more. Raises OSError."""
    with directory_lock(path):
        _remove_unused_kernels(path)
        files = [
            PackageFile(
                name=file.relative_to(path).as_posix(),
                bytes=file.stat().st_size,
                sha256=_digest(file.read_bytes()),
            )
            for file in package_files(path)
        ]
        manifest = Manifest(
            facts=dict(label.facts),
            pairs=[list(pair) for pair in label.pairs],
            prefill_chunk_sizes=list(label.prefill_chunk_sizes),
            variants=list(label.variants),
            versions=dict(label.versions),
            files=files,
        )
        body = manifest.model_dump(mode="json")
        outer = {"manifest": body, "sha256": _digest(_dump(body).encode())}
        write_file(path / MANIFEST, (json.dumps(outer, indent=1) + "\n").encode())
    return manifest


def package_files(path: Path) -> Iterator[Path]:
    """The files that belong to a package, its manifest left out, in order."""
    found = {file for pattern in _PATTERNS for file in path.glob(pattern)}
    for file in sorted(found):
        if file.name != MANIFEST and not file.name.startswith("."):
            yield file


def fact_differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """What differs between two sets of facts: a phrase with both values for each name."""
    absent = "(absent)"
    return {
        name: f"{name} is {theirs.get(name, absent)} there, {ours.get(name, absent)} here"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name, absent) != ours.get(name, absent)
    }


def _remove_unused_kernels(path: Path) -> None:
    used: set[str] = set()
    for file in (path / REGIONS).glob("*.json"):
        try:
            used |= stored_kernels(file.read_text(encoding="utf-8"))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # damaged, so that a start compiles it again
    for file in (path / KERNELS).glob("*.so"):
        if file.name not in used:
            file.unlink(missing_ok=True)


def _dump(body: Any) -> str:
    return json.dumps(body, sort_keys=True)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
