"""What of the GPU run can be seen without one: its skip, arithmetic, cases and scene."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from decodegrid.graphs.state import Capacity
from decodegrid.kernels.providers.probe import Device, Target
from decodegrid.kernels.step_kernels import OPS
from decodegrid.kernels.tile.table import find_op, kernels
from tests.gpu.cases import CASES, Case, compare, has_case
from tests.gpu.figures import (
    Budget,
    Row,
    format_table,
    least_seconds,
    microseconds,
    share_of_peak,
    visited_experts,
)
from tests.gpu.main import main, run_parts, skip_reason
from tests.gpu.scene import ROOT, Scene, make_scene, plain_scene, read_config, weight_bytes

TINY = [kernel for kernel in kernels() if kernel.model == "tiny"]
WITH_CASES = [kernel for kernel in TINY if has_case(kernel.op, kernel.sizes)]


@pytest.fixture
def no_card() -> None:
    assert not torch.cuda.is_available(), "these tests are about a machine without a GPU"


def test_the_script_skips_cleanly(no_card: None, tmp_path: Path) -> None:
    """A message, exit status 0, and neither TileLang nor pydantic on the way."""
    blocker = tmp_path / "sitecustomize.py"
    blocker.write_text("import sys\nsys.modules.update({'tilelang': None, 'pydantic': None})\n")
    done = subprocess.run(
        ["bash", "tests/gpu/run.sh"], cwd=ROOT, capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("skipped: ") and done.stdout.count("\n") == 1


def test_the_card_parts_import_without_tilelang_and_pydantic(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update({'tilelang': None, 'pydantic': None, 'tvm': None})\n"
        "import tests.gpu.measure, tests.gpu.main"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_which_cards_are_skipped() -> None:
    assert skip_reason(Device(Target.SM90, "H200", True, (9, 0))) == ""
    assert "built for Hopper" in skip_reason(Device(Target.OTHER, "a card, sm_89", True, (8, 9)))
    assert skip_reason(Device(Target.OTHER, "no driver", False)) == "no driver"


def test_cubins_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = Device(Target.SM90, "H200", True, (9, 0))
    monkeypatch.setattr("tests.gpu.main.read_device", lambda name: card)
    assert main(["--cubins", str(tmp_path)]) == 2
    assert "no cubins in" in capsys.readouterr().out


def test_parts_fail_alone_and_stop_in_time() -> None:
    now = [0.0]

    def good() -> Iterator[Row]:
        now[0] += 10
        yield Row("a", "ok")

    def bad() -> Iterator[Row]:
        yield Row("b", "ok")
        raise RuntimeError("CUDA error: an illegal access\nmore")

    parts = [("good", 5.0, good), ("bad", 5.0, bad), ("late", 100.0, good), ("last", 1.0, good)]
    rows = run_parts(parts, Budget(60.0, 0.0), lambda: now[0])
    results = [(row.what, row.result) for row in rows if not row.what.endswith("time")]
    assert results == [
        ("a", "ok"), ("b", "ok"), ("bad", "FAILED"), ("late", "not run"), ("a", "ok"),
    ]  # fmt: skip
    assert rows[3].note == "RuntimeError: CUDA error: an illegal access"


def test_figures() -> None:
    assert visited_experts(4, 6, 384) == 24 and visited_experts(192, 6, 384) == 384
    assert least_seconds(4.8e9, 4.8e12) == pytest.approx(1e-3)
    assert share_of_peak(2.4e9, 1e-3, 4.8e12) == "50% of 4.8 TB/s"
    assert microseconds([3e-6, 1e-6, 2e-6]) == "1.0 / 2.0 us"
    with pytest.raises(ValueError, match="a peak of 0"):
        least_seconds(1.0, 0.0)
    text = format_table([Row("longer name", "ok"), Row("b", "FAILED", "why")])
    assert text.splitlines() == ["longer name  ok", "b            FAILED  why", "2 lines, 1 failed"]
    budget = Budget(10.0, 100.0)
    assert budget.allows(104.0, 6.0) and not budget.allows(104.5, 6.0)
    assert budget.left(103.0) == 7.0


def test_every_kernel_has_a_case_or_runs_in_the_step() -> None:
    without = {kernel.op for kernel in kernels() if kernel.op not in CASES}
    assert without == {
        "store_hopper", "take_hopper", "decode_tokens", "accept", "select_threshold", "mark_blocks",
    }  # fmt: skip


@pytest.fixture(scope="module")
def cpu_route() -> Any:
    path = ROOT / "tests" / "kernels" / "tile" / "cpu_route.py"
    spec = importlib.util.spec_from_file_location("tile_cpu_route", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.kernels
@pytest.mark.parametrize("kernel", WITH_CASES, ids=lambda kernel: kernel.name)
def test_cases_hold_on_the_cpu(kernel: Any, cpu_route: Any) -> None:
    """What a card will be asked, asked of the same sources' CPU form."""
    case = CASES[kernel.op](kernel.sizes)
    call = cpu_route.compile_kernel(
        find_op(kernel.op).factory, kernel.sizes, ROOT / "build" / "tile-cpu"
    )
    call(*case.tensors)
    outcome = compare(case, case.tensors)
    assert outcome.is_right, outcome.worst


def test_a_wrong_value_is_seen() -> None:
    right = torch.tensor([1.0, float("nan")])
    assert compare(Case([right], {0: right.clone()}), [right]).is_right
    assert not compare(Case([right], {0: torch.tensor([1.0, 2.0])}), [right]).is_right
    near = torch.tensor([1.001, float("nan")])
    assert compare(Case([near], {0: right}, 0.01), [near]).is_right
    assert not compare(Case([near], {0: right}, 1e-6), [near]).is_right


@pytest.fixture(scope="module")
def scene() -> Scene:
    """The scene of the card's first step, on the CPU and smaller."""
    config = read_config(ROOT / "configs" / "tiny-v41" / "config.json")
    capacity = Capacity(4, 3 * 4 + 1, 64, 256, 5, kv_cache="v41")
    return make_scene(config, capacity, "cpu", torch.float32, OPS, None)


def test_a_scene_runs_and_comes_back(scene: Scene) -> None:
    """The same input gives the same result, bit for bit; a step changes the state."""
    before = scene.snapshot()
    scene.ask(2, 7)
    found = []
    with torch.no_grad():
        for _ in range(2):
            scene.restore(before)
            scene.step(2, 7)()
            found.append(scene.results())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
    assert bool(found[0]["logits"][:7].isfinite().all())
    assert bool(found[0]["logits"][:7].std() > 0)
    assert bool((found[0]["num_emitted"][:2] >= 1).all())
    assert not torch.equal(found[0]["slots.seq_len"], before["slots.seq_len"])


@pytest.mark.kernels
def test_plain_torch_gives_the_same_logits(scene: Scene) -> None:
    before = scene.snapshot()
    scene.ask(2, 7)
    logits = []
    with torch.no_grad():
        for one in (scene, plain_scene(scene)):
            one.restore(before)
            one.step(2, 7)()
            logits.append(one.results()["logits"][:7])
    scene.restore(before)
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-2)


def test_weight_bytes_follow_the_tokens(scene: Scene) -> None:
    """Experts count as far as tokens can visit them, everything else once."""
    layers = (*scene.model.weights.layers, *scene.model.weights.draft_layers)
    experts = sum(
        part.numel() for layer in layers for weight in (layer.moe.w13, layer.moe.w2)
        for part in weight
    )  # fmt: skip
    few, all_of_them = weight_bytes(scene, 1), weight_bytes(scene, 10_000)
    assert 0 < few < all_of_them and all_of_them - few < experts
    assert all_of_them == weight_bytes(scene, 20_000)
