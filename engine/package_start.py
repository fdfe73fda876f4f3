"""Where a start takes compiled code from: a package that was named, or the cache directory.

Owns the comparison of a package with what this start needs, what is said about a difference, and
what is put back when the start is done. Does not own the form of a package
(`decodegrid.capture.package`). Data flow: facts of the start -> `StartSource` -> regions and native
kernels from it -> `finish` keeps what was compiled, and repairs what was damaged.

A package of another deployment is an error. One of another program, library, kernel or processor is
not trusted: its factors are named with both values, and everything is compiled afresh.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from decodegrid.capture.code_paths import neutral_library
from decodegrid.capture.package import (
    MANIFEST,
    NATIVE,
    DamagedManifestError,
    Manifest,
    PackageError,
    PackageLabel,
    checked_file,
    fact_differences,
    read_manifest,
    seal_package,
)
from decodegrid.capture.region_store import RegionStore, facts_key, write_file
from decodegrid.engine.native_start import start_native_kernels
from decodegrid.engine.region_facts import is_of_deployment
from decodegrid.kernels.native import (
    NativeBuildError,
    has_native_kernels,
    library_path,
    load_native_kernels,
    loaded_library,
)

_LOG = logging.getLogger("decodegrid.package")


@dataclass(slots=True)
class StartSource:
    """What a start takes compiled code from and gives it back to."""

    store: RegionStore
    is_package: bool
    """Whether the user named the directory; otherwise it is in the cache directory."""
    manifest: Manifest | None
    """None where there is none yet, or where it is damaged."""
    needs_seal: bool = False
    """Whether the directory is not what its manifest will say."""
    _notes: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """The directory."""
        return self.store.path

    @property
    def notes(self) -> list[str]:
        """What differed, was damaged, or could not be used or written, one line each."""
        return [*self._notes, *self.store.notes]

    def note(self, line: str) -> None:
        """Say something at once, because what follows may take minutes, and in the report."""
        self._notes.append(line)
        _LOG.warning("%s", line)

    def install_native(self, cache_dir: Path, *, is_shown: bool = False) -> None:
        """Make the native kernels those of the directory, or build them in `cache_dir`.

        is_shown: say so before a build. Raises NativeBuildError.
        """
        name = f"{NATIVE}/{library_path(Path()).name}"
        if has_native_kernels():
            return
        if self.manifest is not None and self.manifest.file(name) is not None:
            try:
                load_native_kernels(checked_file(self.path, self.manifest, name))
                return
            except (PackageError, NativeBuildError) as error:
                self.needs_seal = True
                self.note(f"{error}; built again")
        start_native_kernels(cache_dir, is_shown=is_shown)

    def finish(self, label: PackageLabel) -> None:
        """Complete the directory after a start: the native library, and the manifest.

        A directory that refuses it is noted.
        """
        native = loaded_library()
        wanted = None if native is None else f"{NATIVE}/{native.name}"
        lacks_native = wanted is not None and (
            self.manifest is None or self.manifest.file(wanted) is None
        )
        if not (self.needs_seal or self.store.num_saved or lacks_native or self.manifest is None):
            return
        if not self.path.is_dir():
            return  # nothing could be saved, which the store has noted
        try:
            if native is not None and native.parent != self.path / NATIVE:
                write_file(self.path / NATIVE / native.name, neutral_library(native))
            self.manifest = seal_package(self.path, label)
            self.needs_seal = False
        except OSError as error:
            self._notes.append(f"{self.path}: not completed ({error})")


def check_named_package(path: Path, facts: Mapping[str, str]) -> None:
    """Refuse, before a start does anything slow, a package that cannot be of this deployment.

    facts: those that are known by then.

    Raises:
        PackageError: it is no package, or one of another deployment; names what differs.
    """
    try:
        manifest = read_manifest(path)
    except DamagedManifestError:
        return  # its regions say themselves what they are of
    known = {name: manifest.facts.get(name, "(absent)") for name in facts}
    _refuse_other(path, fact_differences(known, facts))


def open_source(package_dir: Path | None, cache_dir: Path, facts: Mapping[str, str]) -> StartSource:
    """What a start with these facts takes compiled code from.

    Raises:
        PackageError: the named package is none, or of another deployment.
    """
    if package_dir is None:
        return _cached(cache_dir, facts)
    try:
        manifest = read_manifest(package_dir)
    except DamagedManifestError as error:
        source = StartSource(RegionStore(cache_dir, facts, package_dir), True, None)
        source.note(f"{error}; what it lists is taken only where it says itself what it is of")
        return source
    different = fact_differences(manifest.facts, facts)
    _refuse_other(package_dir, different)
    if not different:
        return StartSource(RegionStore(cache_dir, facts, package_dir), True, manifest)
    source = _cached(cache_dir, facts, say_closest=False)
    phrases = "; ".join(different.values())
    source.note(f"package {package_dir} is not used: {phrases}; compiled for this one instead")
    return source


def _refuse_other(path: Path, different: Mapping[str, str]) -> None:
    """Raise PackageError for differences that a deployment decides about."""
    phrases = [text for name, text in different.items() if is_of_deployment(name)]
    if phrases:
        raise PackageError(f"package {path} is of another deployment: {'; '.join(phrases)}")


def _cached(cache_dir: Path, facts: Mapping[str, str], say_closest: bool = True) -> StartSource:
    store = RegionStore(cache_dir, facts)
    try:
        return StartSource(store, False, read_manifest(store.path))
    except DamagedManifestError as error:
        source = StartSource(store, False, None)
        source.note(f"{error}; written again")
        return source
    except PackageError:
        source = StartSource(store, False, None)
    closest = _closest(cache_dir, facts) if say_closest and not store.path.is_dir() else None
    if closest is not None:
        source.note(closest)
    return source


def _closest(cache_dir: Path, facts: Mapping[str, str]) -> str | None:
    """What the kept regions that differ least differ in; None where none are kept."""
    found: list[tuple[int, str]] = []
    for place in sorted(cache_dir.glob(f"regions-*/{MANIFEST}")):
        try:
            theirs = read_manifest(place.parent).facts
        except PackageError:
            continue
        different = fact_differences(theirs, facts)
        if different and facts_key(theirs) == place.parent.name.removeprefix("regions-"):
            line = f"compiled afresh: the closest of the cache, {place.parent.name}, differs: "
            found.append((len(different), line + "; ".join(different.values())))
    return min(found)[1] if found else None
