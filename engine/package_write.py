"""A ready runner as a package directory.

Owns what goes into it. Does not own how its files are laid out (`decodegrid.capture.package`) nor
how a directory takes another's place (`decodegrid.capture.package_swap`). Data flow: the regions
that a start loaded or compiled, the native library, surfaces and documents -> a directory beside
the target -> the target.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from decodegrid.capture.code_paths import neutral_library
from decodegrid.capture.package import NATIVE, SURFACES, Manifest, PackageError, seal_package
from decodegrid.capture.package_swap import Staging
from decodegrid.capture.region_store import write_file
from decodegrid.capture.surface import Surface, SurfaceError
from decodegrid.capture.surface_store import SurfaceStore
from decodegrid.engine.build import package_label
from decodegrid.engine.package_start import StartSource
from decodegrid.engine.runner import Runner
from decodegrid.kernels.native import loaded_library


def write_package(
    runner: Runner,
    staging: Staging,
    surfaces: Sequence[Surface],
    documents: Mapping[str, str],
) -> Manifest:
    """Fill the directory and put it in its place.

    documents: texts by file name, such as ledger.json; nothing in them names a directory or host.

    Raises:
        PackageError: it cannot be written, which leaves what stood there; or the runner's code is
            of a kind that is not kept in files.
    """
    source, path = _source(runner), staging.path
    _check_names(documents)
    missing = sorted(
        name
        for name, variants in source.store.variants.items()
        if not variants or not all(stored.module for stored in variants.values())
    )
    if missing:
        raise PackageError(
            f"a package would lack the code of region {missing[0]}: {'; '.join(source.notes)}"
        )
    try:
        source.store.write_to(path)
        native = loaded_library()
        if native is not None:
            write_file(path / NATIVE / native.name, neutral_library(native))
        for surface in surfaces:
            SurfaceStore(path / SURFACES).save(surface)
        for name, text in documents.items():
            write_file(path / name, text.encode())
        manifest = seal_package(path, package_label(runner))
    except OSError as error:
        raise staging.failure(error) from error
    except SurfaceError as error:
        raise PackageError(str(error)) from error
    staging.publish()
    return manifest


def keep_in_cache(runner: Runner, documents: Mapping[str, str]) -> Manifest:
    """Put documents beside the regions that the cache directory keeps for this runner.

    Raises:
        PackageError: nothing can be written there.
    """
    source = _source(runner)
    _check_names(documents)
    try:
        for name, text in documents.items():
            write_file(source.path / name, text.encode())
        return seal_package(source.path, package_label(runner))
    except OSError as error:
        reason = error.strerror or str(error)
        raise PackageError(f"cannot write {source.path}: {reason}") from error


def package_bytes(manifest: Manifest) -> int:
    """The size of all files that a manifest lists."""
    return sum(entry.bytes for entry in manifest.files)


def _source(runner: Runner) -> StartSource:
    if runner.source is None:
        raise PackageError("compile.backend is eager, which makes no code that could be kept")
    return runner.source


def _check_names(documents: Mapping[str, str]) -> None:
    for name in documents:
        if Path(name).name != name or not name.endswith(".json"):
            raise PackageError(f"{name!r} cannot stand in a package; documents are NAME.json")
