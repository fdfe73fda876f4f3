"""Messages about files of another kind name the command that writes the right one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from decodegrid.capture.plan_costs import read_costs
from decodegrid.capture.plan_trace import read_trace
from decodegrid.capture.profile_document import read_profile

READERS: list[tuple[Callable[[Path], object], str]] = [
    (read_costs, "decodegrid profile --costs"),
    (read_trace, "decodegrid generate --trace"),
    (read_profile, "decodegrid profile --json"),
]


@pytest.mark.parametrize(("read", "command"), READERS, ids=["costs", "trace", "profile"])
def test_a_file_of_another_kind(
    read: Callable[[Path], object], command: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"format": 1, "mistaken": True}))
    with pytest.raises(ValueError) as error:
        read(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and f"in what {command} writes" in message
    assert "\n" not in message
