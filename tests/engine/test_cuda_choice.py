"""What a choice of CUDA kernels changes in a deployment, and that on the CPU it changes nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decodegrid.capture.lowering import CompileOptions
from decodegrid.configs.load import load_config
from decodegrid.engine import build, config_check, cubin_folder
from decodegrid.engine.cli import main
from decodegrid.engine.cuda_kernels import plan_kernels
from decodegrid.engine.deployment_check import capacity_of
from decodegrid.engine.package_start import _refuse_other
from decodegrid.engine.region_facts import is_of_deployment, region_facts
from decodegrid.engine.runner import Runner
from decodegrid.graphs.checkpoint import read_checkpoint_config
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.regions import build_regions
from decodegrid.graphs.weight_packing import pack_weights
from decodegrid.kernels.providers.probe import Device, Target

FACTS = {
    "code", "torch", "python", "machine", "cpu", "instructions", "byte order", "model", "dtype",
    "device", "threads", "storage", "capacity.num_slots", "capacity.num_blocks",
    "capacity.block_size", "capacity.max_model_len", "capacity.num_draft_tokens",
    "capacity.verify", "capacity.kv_cache", "capacity.window_slack", "capacity.rich",
    "capacity.bounded_replay", "capacity.keep_tokens",
}  # fmt: skip
"""Of a start on the CPU."""


def test_on_the_cpu_nothing_is_planned(
    make_eager_runner: Callable[..., Runner], make_model: Callable[..., DraftModel],
    layer_changes: dict[int, dict[str, Any]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The CPU's own kernels, the weights that were packed, the facts that there were."""
    loaded = load_config(None)
    assert plan_kernels(loaded, read_checkpoint_config(loaded.checkpoint_dir)) is None
    packed, asked = [], []

    def pack(*args: Any, **options: Any) -> Any:
        packed.append(pack_weights(*args, **options))
        return packed[-1]

    def make(*args: Any, **options: Any) -> Any:
        asked.append(options)
        return build_regions(*args, **options)

    monkeypatch.setattr(build, "pack_weights", pack)
    monkeypatch.setattr(build, "build_regions", make)
    model = make_model(hc_sinkhorn_iters=2, **layer_changes[2])
    runner = make_eager_runner(model)
    assert runner.model.weights is packed[0] and len(packed) == 1
    assert asked == [{"as_ops": False, "kernels": None}]
    assert set(runner.facts) == FACTS
    assert not any(line.startswith("kernels") for line in runner.start_up_report.splitlines())
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_kernels_are_facts_of_the_machine() -> None:
    """Compiled code of other kernels is not taken; a package of them is none of another
    deployment, which would be an error."""
    loaded = load_config(None)
    model = read_checkpoint_config(loaded.checkpoint_dir)
    options = CompileOptions("inductor", None, 1)
    args = model, capacity_of(loaded.config, 9), options, torch.bfloat16, "cuda", "packed"
    one = region_facts(*args, {"linear": "library: DeepGEMM", "cubins": "abc"})
    two = region_facts(*args, {"linear": "reference: torch linear", "cubins": "abc"})
    assert region_facts(*args).keys() == FACTS == {n for n in one if not n.startswith("kernels.")}
    assert {name for name in one if one[name] != two[name]} == {"kernels.linear"}
    assert not is_of_deployment("kernels.linear") and not is_of_deployment("code")
    assert is_of_deployment("storage")
    _refuse_other(Path("package"), {"kernels.cubins": "kernels.cubins is abc there, def here"})


def test_a_named_folder_is_checked_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = Device(Target.SM90, "a Hopper card", True, (9, 0))
    monkeypatch.setattr(cubin_folder, "read_device", lambda name: card)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(config_check, "free_bytes", lambda device: 10**12)
    asked = [
        "config", "check", "--set=model.device=cuda", "--set=model.dtype=bfloat16",
        f"--set=compile.cache_dir={tmp_path}",
    ]  # fmt: skip
    folder = tmp_path / "own"
    command = f"python -m decodegrid.kernels.tile.build --arch sm_90a --out {folder}"
    assert main([*asked, f"--set=compile.cubins_dir={folder}"]) == 2
    assert capsys.readouterr().err == (
        f"decodegrid: error: compile.cubins_dir is {folder}: {folder}/sm_90a/manifest.json: No "
        f"such file or directory; {command}\n"
    )
    assert main(asked) == 0, "the one in the cache directory need not be there"
    capsys.readouterr()
    # On the CPU the setting is idle, and without a card nobody knows what would be needed.
    idle = [
        "config",
        "check",
        f"--set=compile.cache_dir={tmp_path}",
        f"--set=compile.cubins_dir={folder}",
    ]
    assert main(idle) == 0
    assert "compile.cubins_dir" in capsys.readouterr().out
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    none = Device(Target.OTHER, "no driver", False)
    monkeypatch.setattr(cubin_folder, "read_device", lambda name: none)
    assert main([*asked, f"--set=compile.cubins_dir={folder}"]) == 0
