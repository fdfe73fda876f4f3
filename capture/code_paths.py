"""Compiled libraries without the places where they were built.

Owns which directories a library may name and how they are taken out. A compiler writes the paths of
sources and headers into messages and line tables; machine code does not read them. Data flow: the
bytes of a library -> the same bytes, of the same length, with other characters in those paths.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch

_FILLER = b"/"
_MIN_LENGTH = 2
"""Of a directory's name; "/" alone says nothing and is everywhere."""


def build_directories(library: Path) -> tuple[str, ...]:
    """The directories that a library may name: its own, torch's, Python's, home, this source."""
    places = [
        library.parent,
        library.parent.parent,
        Path(torch.__file__).parent.parent,
        Path(__file__).parent.parent,
        Path(sysconfig.get_path("include")),
        Path(sys.prefix),
        Path(sys.base_prefix),
        Path(os.path.expanduser("~")),
    ]
    names = {str(form) for place in places for form in (place.absolute(), place.resolve())}
    return tuple(sorted(names, key=len, reverse=True))


def without_directories(content: bytes, directories: Iterable[str]) -> bytes:
    """The bytes with every directory that begins a path written over, longest first.

    The length stays: a library refers to its texts by their places.
    """
    for name in directories:
        encoded = os.fsencode(name.rstrip("/"))
        if len(encoded) >= _MIN_LENGTH:
            pattern = re.compile(re.escape(encoded) + rb"(?=[/\0])")
            content = pattern.sub(_FILLER * len(encoded), content)
    return content


def neutral_library(library: Path) -> bytes:
    """The bytes of a library file without the directories that it was built in and from."""
    return without_directories(library.read_bytes(), build_directories(library))
