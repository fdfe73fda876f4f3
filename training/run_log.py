"""Where training runs put their files, their CSV logs, and how they compile pieces."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "training"
LOGS = ROOT / "training" / "logs"


class Log:
    """CSV of figures, appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, row: Mapping[str, float | str]) -> None:
        """Append a row; the first one of a file writes the header."""
        fresh = not self.path.exists()
        with self.path.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, fieldnames=list(row))
            if fresh:
                writer.writeheader()
            writer.writerow(row)


def last_row(path: Path) -> dict[str, str]:
    """The figures that a log ends with."""
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))[-1]


def compile_piece(piece: Any) -> Any:
    """Compile for exact shapes; every piece is small, so a new shape costs about a minute."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(piece, dynamic=False)
