"""A second process on the same cache directory: no Dynamo frame, nothing built, the same bits.

torch still asks the C++ compiler for its version when it loads generated code.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from decodegrid.graphs.checkpoint import save_model
from decodegrid.kernels.native import build_library

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys
from pathlib import Path

import torch

from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.grid import GraphKey, Grid
from decodegrid.capture.phases import PhaseClock
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.engine.runner_protocol import SlotRequest
from decodegrid.graphs.checkpoint import load_model
from decodegrid.graphs.state import Capacity

built = []


def watch(event, args):
    if event == "subprocess.Popen" and any(".cpp" in str(word) for word in args[1]):
        built.append([str(word) for word in args[1]])


sys.addaudithook(watch)
facts = json.loads(sys.argv[1])
cache = Path(facts["cache"])
torch.set_num_threads(1)
options = RunnerOptions(
    capacity=Capacity(*facts["capacity"]),
    grid=Grid([GraphKey(*key) for key in facts["keys"]], facts["max_num_reqs"], 5),
    prefill_chunk_sizes=tuple(facts["chunks"]),
    dtype=torch.float32,
    device="cpu",
    compile_options=CompileOptions("inductor", cache, 1),
    draft_temperatures=(1.0,) * 5,
    show_progress=False,
    native_cache_dir=Path(facts["native"]),
)
traced = []
convert = torch._dynamo.convert_frame
plain = convert.compile_frame
convert.compile_frame = lambda *a, **k: traced.append(a) or plain(*a, **k)
runner = make_runner(load_model(facts["checkpoint"]), options, PhaseClock())
prompt = facts["prompt"]
runner.prefill(1, prompt[:16], 0, (-1, -1, -1), [1, 2, 3, 4])
runner.prefill(1, prompt[16:-1], 16, tuple(prompt[13:16]), [1, 2, 3, 4])
request = SlotRequest(
    last_token=prompt[-1], seq_len=len(prompt), history=tuple(prompt[-4:-1]), max_seq_len=60,
    temperature=0.0, seed=0, stop_token_ids=(),
)
runner.start(1, request, [1, 2, 3, 4])
runner.decode([1], 1)
runner.decode([1], 6)
slots = runner.model.state.slots
print(json.dumps({
    "compilations": runner.num_compilations,
    "loaded": runner.counters.num_loaded,
    "captured": runner.num_captured,
    "traced": len(traced),
    "built": built,
    "notes": [n for n in runner.start_up_report.splitlines() if "not stored" in n or "again" in n],
    "drafts": slots.drafts[1].tolist(),
    "confidence": slots.confidence[1].tolist(),
    "seq_len": int(slots.seq_len[1]),
}))
"""


def test_a_second_start_neither_traces_nor_compiles(
    compiled_run, make_prompt, native_kernels, tmp_path
):
    """Every process that the second start makes is watched for a C++ source."""
    run, runner = compiled_run, compiled_run.runner
    save_model(run.model, tmp_path / "model", torch.float32, run.raw)
    capacity = runner.model.state.capacity
    prompt = make_prompt(21, 3)
    facts = {
        "cache": str(run.cache_dir),
        "native": str(build_library(native_kernels).parent),
        "checkpoint": str(tmp_path / "model"),
        "capacity": [
            capacity.num_slots,
            capacity.num_blocks,
            capacity.block_size,
            capacity.max_model_len,
            capacity.num_draft_tokens,
        ],
        "keys": [[key.num_reqs, key.num_query_tokens] for key in runner.grid.keys],
        "max_num_reqs": runner.max_num_reqs,
        "chunks": list(runner.prefill_chunk_sizes),
        "prompt": prompt,
    }
    # torch tries the vector instructions once for each cache directory. This process may have done
    # so in another one, so the first of two starts may still build that probe.
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(facts)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["traced"] == 0 and found["compilations"] == 0
    assert found["notes"] == [] and found["traced"] == 0 and found["compilations"] == 0
    assert found["loaded"] == runner.counters.num_compilations
    assert found["captured"] == runner.num_captured
    assert found["built"] == []

    run.reset()
    run.begin(1, prompt, [16, 4])
    run.decode([1], 1)
    run.decode([1], 6)
    slots = runner.model.state.slots
    assert found["drafts"] == slots.drafts[1].tolist()
    assert found["confidence"] == slots.confidence[1].tolist()
    assert found["seq_len"] == int(slots.seq_len[1])
