"""A profile as CSV files, one a table, for spreadsheets and scripts.

Owns the files' names and columns: the fields of the document, in their order and units. What holds
several values in a field is written as `name=count` or as names, separated by spaces.
"""

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from uuid import uuid4

from pydantic import BaseModel

from decodegrid.capture.profile_document import (
    GraphEntry,
    GraphHits,
    PrefillTime,
    Profile,
    RegionEntry,
    SurfacePair,
)

FILES = ("surface.csv", "prefill.csv", "graphs.csv", "regions.csv", "hits.csv")


def csv_texts(profile: Profile) -> dict[str, str]:
    """Text by file name, for each of FILES; a table without rows has its header alone."""
    hits = [] if profile.live is None else profile.live.hits
    pairs = [
        {"context_len": surface.context_len, **_cells(pair)}
        for surface in profile.surfaces
        for pair in surface.pairs
    ]
    texts = (
        _text(("context_len", *_columns(SurfacePair)), pairs),
        _text(_columns(PrefillTime), map(_cells, profile.prefill)),
        _text(_columns(GraphEntry), map(_cells, profile.graphs)),
        _text(_columns(RegionEntry), map(_cells, profile.regions)),
        _text(_columns(GraphHits), map(_cells, hits)),
    )
    return dict(zip(FILES, texts, strict=True))


def write_csv(profile: Profile, directory: Path) -> list[Path]:
    """Write FILES into a directory, which is made if its parent exists; older ones are replaced
    whole. Raises OSError."""
    directory.mkdir(exist_ok=True)
    written = []
    for name, text in csv_texts(profile).items():
        path = directory / name
        part = directory / f".{name}.{uuid4().hex}.tmp"
        try:
            part.write_text(text, encoding="utf-8", newline="")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        written.append(path)
    return written


def _columns(part: type[BaseModel]) -> tuple[str, ...]:
    """Sizes and contexts first, then the rest as they are declared."""
    names = list(part.model_fields)
    own = [name for name in names if name in part.__annotations__]
    return (*own, *(name for name in names if name not in own))


def _cells(part: BaseModel) -> dict[str, object]:
    return {name: _cell(value) for name, value in part.model_dump().items()}


def _cell(value: object) -> object:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={count}" for name, count in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value


def _text(columns: tuple[str, ...], rows: Iterable[Mapping[str, object]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
