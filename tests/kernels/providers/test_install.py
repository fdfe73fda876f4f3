"""What is installed is the process's, once: tried in a process of its own, for good."""

import subprocess
import sys

SCRIPT = """
from dataclasses import replace
import torch
from decodegrid.kernels.providers import deep_gemm_experts, install as place
from decodegrid.kernels.providers.implementations import IMPLEMENTATIONS
from decodegrid.kernels.providers.packages import PACKAGES
from decodegrid.kernels.providers.probe import Target
from decodegrid.kernels.providers.registry import (
    BuiltKernels, NativeState, StepShape, as_if_installed, choose,
)
from decodegrid.kernels.providers.wrapper import KernelArgumentError

SHAPE = StepShape(
    dtype="bfloat16", hidden_size=5120, num_heads=64, head_dim=512, index_heads=32, index_dim=128,
    index_topk=512, window=128, moe_inner=2304, num_experts=384, vocab_size=129280, block_size=128,
    hc_mult=4, hc_iters=20, hc_eps=1e-6, kv_records=True, packed_matrices=True, packed_experts=True,
)

def table(target, shape=SHAPE, built=None):
    device, probes = as_if_installed(PACKAGES, target)
    probes = [
        replace(probe, module=torch) if probe.package.name == "deep_gemm" else probe
        for probe in probes
    ]
    return choose(IMPLEMENTATIONS, device, probes, shape, NativeState(False, "no"), built)

def refusal(*args):
    try:
        place.install(*args)
    except ValueError as error:
        return str(error)
    raise AssertionError("installed")

made = []

class Mega:
    def run(self, module, *args):
        made.append(("run", tuple(args[4].shape)))

def buffers():
    made.append("buffers")
    return {(8, 2): Mega()}

def launch(name, *tensors):
    made.append(name)

place.install(table(Target.CPU), None)
assert place.installed() is None, "nothing of the CPU's is bound"
message = refusal(table(Target.SM100), None)
assert message == "kernels of ours were chosen, but nothing launches them"
assert place.installed() is None and not made

place.install(table(Target.SM100), launch, "cubins abc", buffers)
first = place.installed()
assert first["device"] == "sm100" and first["kernels"] == "cubins abc"
assert "sinkhorn" in first["ops served by kernels"]
has = torch._C._dispatch_has_kernel_for_dispatch_key
assert has("decodegrid::sinkhorn", "CUDA") and not has("decodegrid::uniform_noise", "CUDA")
assert has("decodegrid_tile::sparse_mla", "CUDA") and has("decodegrid_gemm::fp8_gemm", "CUDA")
assert has("decodegrid_experts::mega_moe", "CUDA")

# The same again: nothing is made twice. A choice of regions alone may differ.
place.install(table(Target.SM100), launch, "cubins abc", buffers)
place.install(table(Target.SM100, replace(SHAPE, num_heads=48)), launch, "cubins abc", buffers)
assert made == ["buffers"] and place.installed() == first

message = refusal(table(Target.SM100), launch, "cubins def", buffers)
assert message == (
    "this process has CUDA kernels of another deployment installed: kernels [cubins abc] there, "
    "[cubins def] here; start it in a process of its own"
), message
assert "device [sm100] there, [sm90] here" in refusal(table(Target.SM90), launch, "cubins abc")
few = BuiltKernels(frozenset({"gumbel_noise-vocab129280"}), "x")
message = refusal(table(Target.SM100, SHAPE, few), launch, "cubins abc", buffers)
assert "[gumbel_noise, select_entries] here" in message and "sinkhorn" in message
assert made == ["buffers"] and place.installed() == first
"""


def test_one_table_a_process() -> None:
    """Another one is refused with what differs; the same one makes nothing again."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
