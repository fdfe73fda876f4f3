"""What of the GPU run can be seen without one: its skip, arithmetic, cases and scene."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine.cuda_kernels import step_shape
from decodegrid.graphs.state import Capacity
from decodegrid.kernels.providers.implementations import IMPLEMENTATIONS
from decodegrid.kernels.providers.install import identity
from decodegrid.kernels.providers.packages import PACKAGES
from decodegrid.kernels.providers.probe import Device, Target
from decodegrid.kernels.providers.registry import Kind, NativeState, as_if_installed, choose
from decodegrid.kernels.step_kernels import OPS
from tests.gpu.case_form import Case, compare
from tests.gpu.experts import expert_buffers
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
from tests.gpu.measure import SETTINGS, Setting
from tests.gpu.scene import (
    ROOT,
    Scene,
    make_scene,
    plain_scene,
    read_config,
    shape_of,
    weight_bytes,
)


@pytest.fixture
def no_card() -> None:
    assert not torch.cuda.is_available(), "these tests are about a machine without a GPU"


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


def test_a_wrong_value_is_seen() -> None:
    right = torch.tensor([1.0, float("nan")])
    assert compare(Case([right], {0: right.clone()}), [right]).is_right
    assert not compare(Case([right], {0: torch.tensor([1.0, 2.0])}), [right]).is_right
    near = torch.tensor([1.001, float("nan")])
    assert compare(Case([near], {0: right}, 0.01), [near]).is_right
    assert not compare(Case([near], {0: right}, 1e-6), [near]).is_right


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.path.parent.name)
def test_the_shape_is_a_deployments(setting: Setting) -> None:
    """What kernels are chosen by, as an engine would have it for the same model."""
    capacity = setting.capacity
    config = read_config(setting.path, **setting.changes)
    text = {
        "model": {
            "checkpoint": "there",
            "device": "cuda",
            "dtype": "bfloat16",
            "weights": "packed",
        },
        "cache": {"kv_cache": "v41", "block_size": capacity.block_size},
        "speculation": {"num_draft_tokens": capacity.num_draft_tokens},
    }
    deployment = DeploymentConfig.model_validate(text)
    assert shape_of(config, capacity, torch.bfloat16) == step_shape(deployment, config)


@pytest.mark.parametrize("target", [Target.SM90, Target.SM100])
def test_one_installation_serves_all_settings(target: Target) -> None:
    """A process installs once: what both models choose must be the same."""
    device, probes = as_if_installed(PACKAGES, target)
    native, found = NativeState(False, "for the CPU"), []
    for setting in SETTINGS:
        config = read_config(setting.path, **setting.changes)
        shape = shape_of(config, setting.capacity, torch.bfloat16)
        table = choose(IMPLEMENTATIONS, device, probes, shape, native)
        found.append((identity(table, ""), table.uses("packed_experts", Kind.LIBRARY)))
    assert found[0] == found[1]
    assert found[0][1] is (target is Target.SM100)


def test_buffers_of_the_fused_experts() -> None:
    """One for each number of experts, as large as the largest call; no two alike."""
    asked = []

    def make_buffer(*args: Any) -> object:
        asked.append(args)
        return object()

    library = SimpleNamespace(mega=SimpleNamespace(get_symm_buffer_for_mega_moe=make_buffer))
    models = [(read_config(s.path, **s.changes), s.capacity) for s in SETTINGS]
    buffers = expert_buffers(library, models)
    sizes = {(args[1], args[3]): args[2] for args in asked}
    assert set(buffers) == set(sizes) and len(sizes) == len(asked) == 4
    for model, capacity in models:
        rows = capacity.num_slots - 1
        key = model.n_routed_experts, model.num_experts_per_tok
        assert sizes[key] == rows * (capacity.num_draft_tokens + 1)
        key = model.dspark_n_routed_experts, model.dspark_num_experts_per_tok
        assert sizes[key] == rows * model.dspark_block_size
    assert all(args[0].size() == 1 for args in asked)
    with pytest.raises(ValueError, match="two models with"):
        expert_buffers(library, [models[0], models[0]])


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
