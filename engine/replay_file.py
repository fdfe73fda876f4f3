"""Dump files on disk: whole or absent, private, bounded in number, and checked when read.

Owns the frame around a dump and the files' names; what stands inside is engine/replay_dump.py's. A
file is one line of JSON with version, length and hash, then the content: a reader can tell a
foreign, a newer, a cut and a changed file apart before it looks inside. JSON alone is enough: a
dump holds integers and a few probabilities, no tensors.
"""

import hashlib
import json
import os
import re
import secrets
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

FORMAT_VERSION = 1
MAX_BYTES = 256 << 20
"""Of a whole file; larger ones are neither written nor read."""
STALE_S = 3600.0
"""Age from which a part that a killed process left behind is removed."""

_KEY = "decodegrid_dump"
_MAX_HEADER = 512
_NAME = re.compile(r"step-\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{8}\.dump")
_PART = re.compile(r"\.step-\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{8}\.dump\.part")


class DumpError(ValueError):
    """A dump that cannot be written or used: names the file and what is wrong with it."""


def write_dump(directory: Path, content: bytes, keep: int) -> Path:
    """Write a new dump with mode 0600 and remove the oldest beyond `keep` (at least 1).

    The directory is made with mode 0700 where it is absent. Only files of this module's names are
    ever removed. Raises DumpError.
    """
    header = {
        _KEY: FORMAT_VERSION,
        "num_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    data = json.dumps(header).encode() + b"\n" + content
    if len(data) > MAX_BYTES:
        raise DumpError(f"a dump of {len(data)} bytes is not written; at most {MAX_BYTES} are")
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    path = directory / f"step-{stamp}Z-{secrets.token_hex(4)}.dump"
    part = directory / f".{path.name}.part"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            # Opened with its mode, so that it is never readable for others.
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise DumpError(f"cannot write the dump {path}: {error.strerror or error}") from error
    _remove_old(directory, path.name, keep)
    return path


def read_dump(path: Path) -> bytes:
    """The content of a dump file. Raises DumpError."""
    data = _read_all(path)
    line, newline, content = data.partition(b"\n")
    header = _parse_header(line) if newline and len(line) <= _MAX_HEADER else None
    if header is None:
        raise DumpError(f"{path} is not a dump of decodegrid")
    version, num_bytes, digest = header
    if version != FORMAT_VERSION:
        raise DumpError(
            f"{path} is a dump of format version {version}; this decodegrid reads version "
            f"{FORMAT_VERSION}"
        )
    if len(content) < num_bytes:
        raise DumpError(f"{path} is cut off: {len(content)} of {num_bytes} bytes are there")
    if len(content) > num_bytes:
        raise DumpError(f"{path} has {len(content) - num_bytes} bytes behind its end")
    if hashlib.sha256(content).hexdigest() != digest:
        raise DumpError(f"{path} is damaged: its content does not have the hash that it names")
    return content


def _read_all(path: Path) -> bytes:
    try:
        if not path.is_file():  # a pipe would block, a directory has an error of its own
            if path.exists():
                raise DumpError(f"{path} is not a file")
            raise DumpError(f"there is no dump {path}")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DumpError(f"{path} has {size} bytes; a dump has at most {MAX_BYTES}")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, DumpError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise DumpError(f"cannot read the dump {path}: {reason}") from error


def _parse_header(line: bytes) -> tuple[int, int, str] | None:
    """(version, bytes of content, their hash), or None where it is no header of a dump.

    Of another version only the version counts: the rest may have changed its meaning.
    """
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or type(header.get(_KEY)) is not int:
        return None
    version: int = header[_KEY]
    if version != FORMAT_VERSION:
        return version, 0, ""
    num_bytes, digest = header.get("num_bytes"), header.get("sha256")
    if type(num_bytes) is not int or num_bytes < 0 or not isinstance(digest, str):
        return None
    return version, num_bytes, digest


def _remove_old(directory: Path, newest: str, keep: int) -> None:
    """What cannot be listed or removed stays: the dump that was just written counts more."""
    with suppress(OSError):
        names = sorted(name for name in os.listdir(directory) if _NAME.fullmatch(name))
        # Names sort by time; a clock that was set back must not remove the new one.
        older = [name for name in names if name != newest]
        for name in older[: max(len(older) - max(keep, 1) + 1, 0)]:
            with suppress(OSError):
                (directory / name).unlink()
        for name in filter(_PART.fullmatch, os.listdir(directory)):
            with suppress(OSError):
                if (directory / name).lstat().st_mtime < time.time() - STALE_S:
                    (directory / name).unlink()
