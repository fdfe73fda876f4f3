"""How much memory loading takes: at most the model, one file of it and a fixed rest."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decodegrid.graphs.checkpoint import config_of_quantised
from decodegrid.graphs.checkpoint_files import write_json, write_tensors
from decodegrid.graphs.checkpoint_inventory import released_tensors
from decodegrid.graphs.checkpoint_names import FLOAT_DTYPES
from decodegrid.graphs.model_config import parse_model_config

SHARD = 8 * 2**20
REST = 300 * 2**20
"""What is promised beside the model and one file."""

# Peak resident memory of this program alone: getrusage's figure would start at its parent's.
PROGRAM = """
import json, sys
from pathlib import Path
from decodegrid.graphs.checkpoint import load_model

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

directory, warm, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
load_model(warm, **options)
before = peak()
model = load_model(directory, **options)
tensors = [*model.parameters(), *model.buffers()]
print(json.dumps({"growth": peak() - before, "model": sum(t.nbytes for t in tensors)}))
"""


def write_random(directory: Path, raw: dict[str, Any], shard_bytes: int) -> None:
    """A quantised checkpoint with random bytes in it, made without a model in memory."""
    config = parse_model_config(raw)
    draw = torch.Generator().manual_seed(51)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for tensor in released_tensors(config, None):
            dtype = tensor.dtype
            if dtype in FLOAT_DTYPES:
                yield tensor.name, torch.full(tensor.shape, 0.01, dtype=FLOAT_DTYPES[dtype])
            elif dtype == "F8_E8M0":
                full = torch.full(tensor.shape, 120, dtype=torch.uint8)
                yield tensor.name, full.view(torch.float8_e8m0fnu)
            else:
                codes = torch.randint(0, 0x7F, tensor.shape, generator=draw, dtype=torch.uint8)
                yield tensor.name, codes.view(torch.int8 if dtype == "I8" else torch.float8_e4m3fn)

    directory.mkdir()
    write_json(directory / "config.json", raw)
    write_tensors(directory, tensors(), shard_bytes)


@pytest.fixture(scope="module")
def large(
    make_raw: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A checkpoint of 49 M weights (196 MB in float32) in several files, and a small one."""
    base = tmp_path_factory.mktemp("memory")
    small = config_of_quantised(make_raw(moe_intermediate_size=32, engram_head_dim=32))
    write_random(base / "small", small, 2**32)
    changes = {"hidden_size": 256, "moe_intermediate_size": 256, "n_routed_experts": 28}
    raw = make_raw(**changes, engram_head_dim=32)
    write_random(base / "large", config_of_quantised(raw), SHARD)
    return base / "large", base / "small"


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"weights": "expanded"}, 150 * 2**20),
        ({"weights": "packed"}, 20 * 2**20),
    ],
)
def test_peak_while_loading(large: tuple[Path, Path], options: dict[str, str], least: int) -> None:
    directory, small = large
    shards = [path.stat().st_size for path in directory.glob("model-*.safetensors")]
    assert len(shards) >= 4 and max(shards) < 1.1 * SHARD
    command = [sys.executable, "-c", PROGRAM, str(directory), str(small), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    found = json.loads(done.stdout)
    assert found["model"] >= least
    # Tighter than the promise: with all of it free, a second copy of this model would pass.
    assert found["growth"] <= found["model"] + max(shards) + REST / 4
