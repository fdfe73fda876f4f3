"""The native kernels at start-up: built where they are not there yet, with a word about it.

Owns the word. The build itself is `decodegrid.kernels.native`'s; it takes a minute, before
the first compilation, whose progress is shown.
"""

import sys
from pathlib import Path

from decodegrid.kernels.native import has_native_kernels, install_native_kernels, library_path


def start_native_kernels(cache_dir: Path, *, is_shown: bool) -> None:
    """Install the kernels, built in `cache_dir` unless they are there.

    is_shown: a line on standard error before a build. Raises NativeBuildError.
    """
    if is_shown and not has_native_kernels() and not library_path(cache_dir).exists():
        print(
            "start-up: building the native kernels, once for this cache directory; the step's "
            "regions are compiled behind it",
            file=sys.stderr,
            flush=True,
        )
    install_native_kernels(cache_dir)
