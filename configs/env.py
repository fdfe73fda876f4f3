"""The only reader and writer of the process environment.

Owns the names and the meaning of the environment variables; does not own where a compile cache
is laid out. None of them is needed for correct results, and each has a counterpart in the
deployment file, which wins over it. Nothing is read at import: callers ask when they need a
value.

    DECODEGRID_CACHE_DIR  directory for compile caches where `compile.cache_dir` is empty
    XDG_CACHE_HOME        parent of the default cache directory (the XDG base directory rules)
"""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """The per-user directory for compile caches; it is not created here.

    `$DECODEGRID_CACHE_DIR`, else `$XDG_CACHE_HOME/decodegrid`, else `~/.cache/decodegrid`. A
    variable that is set to nothing counts as not set. A leading `~` is expanded.

    Raises ValueError for a relative DECODEGRID_CACHE_DIR: it would mean another directory for
    each working directory. A relative XDG_CACHE_HOME is ignored, as the XDG rules demand.
    """
    own = os.environ.get("DECODEGRID_CACHE_DIR", "")
    if own:
        path = Path(own).expanduser()
        if not path.is_absolute():
            raise ValueError(f"DECODEGRID_CACHE_DIR must be an absolute path, got {own!r}")
        return path
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "decodegrid"


def set_inductor_cache_dir(directory: Path) -> None:
    """Let inductor keep its compile caches in `directory`, for this process and its children.

    Writes TORCHINDUCTOR_CACHE_DIR, the only way in that torch offers, and so wins over a value
    from outside: the deployment says where caches are. Call it before the first compilation.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)


def set_tensor_pointer(address: int) -> None:
    """Tell libraries of generated code where torch's function for a tensor's memory is.

    Writes _TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR, which such a library reads when it is loaded and
    without which it refuses; torch writes it too when it loads one.
    """
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
