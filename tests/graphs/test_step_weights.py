"""How matrices are stored: bfloat16 where that is exact for all of them, and what a step makes of
it.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decodegrid.capture.grid import build_grid
from decodegrid.capture.lowering import Backend, CompileOptions
from decodegrid.capture.phases import PhaseClock
from decodegrid.engine import build
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.graphs.decode_step import decode_step
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.prefill_step import prefill_step
from decodegrid.graphs.regions import build_regions, plain_regions
from decodegrid.graphs.state import Capacity
from decodegrid.graphs.step_weights import StepWeights
from decodegrid.graphs.target_step import StepModel
from decodegrid.graphs.weight_packing import pack_weights
from decodegrid.kernels.native import install_native_kernels

BUILD = Path(__file__).resolve().parents[2] / "build" / "native"
# Products with many outputs; all other fields stay in the model's dtype.
NARROW = {
    "w_in", "wq_b", "wo_a", "wo_b", "wk", "w13", "w2", "shared_w13", "shared_w2", "wkv",
    "main_proj", "markov_head", "head",
}


def named_tensors(part: Any, name: str = "") -> dict[str, Tensor]:
    """Every tensor below a part by its path."""
    if isinstance(part, Tensor):
        return {name: part}
    found: dict[str, Tensor] = {}
    if isinstance(part, tuple):
        for index, item in enumerate(part):
            found |= named_tensors(item, f"{name}.{index}")
    elif is_dataclass(part):
        for item in fields(part):
            found |= named_tensors(getattr(part, item.name), f"{name}.{item.name}")
    return found


def round_parameters(model: DraftModel) -> DraftModel:
    """Every parameter on a bfloat16 value."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
    return model


@pytest.fixture
def rounded(make_model: Callable[..., DraftModel]) -> DraftModel:
    return round_parameters(make_model(dtype=torch.float32))


def dtypes(weights: StepWeights) -> dict[str, torch.dtype]:
    return {
        name: tensor.dtype
        for name, tensor in named_tensors(weights).items()
        if tensor.is_floating_point()
    }


def test_matrices_are_stored_narrow_and_keep_their_values(rounded: DraftModel) -> None:
    wide = named_tensors(pack_weights(rounded, with_drafter=True))
    narrow = named_tensors(pack_weights(rounded, with_drafter=True, storage=torch.bfloat16))
    assert narrow.keys() == wide.keys()
    seen = set()
    for name, tensor in narrow.items():
        last = name.rsplit(".", 1)[-1]
        assert torch.equal(tensor.to(wide[name].dtype), wide[name]), name
        if last in NARROW:
            seen.add(last)
            assert tensor.dtype == torch.bfloat16, name
        else:
            assert tensor.dtype == wide[name].dtype, name
        if last in ("w13", "w2"):
            assert tensor.transpose(1, 2).is_contiguous()
    assert seen == NARROW


@pytest.mark.parametrize("where", ["embed", "last_draft_matrix", "nan"])
def test_one_value_that_does_not_fit_keeps_all_wide(rounded: DraftModel, where: str) -> None:
    """All matrices or none; the embedding table is no matrix, so it does not count."""
    if where == "embed":
        rounded.embed.weight[0, 0] = 1.0 + 2.0**-12
    elif where == "nan":
        rounded.head.weight[0, 0] = torch.nan
    else:
        rounded.draft_blocks[-1].ffn.shared_experts.w2.weight[0, 0] = 1.0 + 2.0**-12
    found = dtypes(pack_weights(rounded, with_drafter=True, storage=torch.bfloat16))
    narrow = {name for name, dtype in found.items() if dtype == torch.bfloat16}
    assert bool(narrow) == (where == "embed")


@pytest.mark.parametrize(
    ("backend", "dtype", "device", "want"),
    [
        ("inductor", torch.float32, "cpu", torch.bfloat16),
        ("eager", torch.float32, "cpu", torch.bfloat16),
        ("none", torch.float32, "cpu", None),
        ("eager", torch.float64, "cpu", None),
        ("eager", torch.bfloat16, "cpu", None),
        ("inductor", torch.float32, "cuda", None),
    ],
)
def test_storage_that_start_up_asks_for(
    make_model: Callable[..., DraftModel],
    monkeypatch: pytest.MonkeyPatch,
    backend: Backend,
    dtype: torch.dtype,
    device: str,
    want: torch.dtype | None,
) -> None:
    asked = []

    class Stop(Exception):
        """Start-up has asked for its weights."""

    def record(model: DraftModel, *, with_drafter: bool, storage: torch.dtype | None) -> None:
        asked.append(storage)
        raise Stop

    monkeypatch.setattr(build, "pack_weights", record)
    options = RunnerOptions(
        capacity=Capacity(2, 8, 8, 64, 2),
        grid=build_grid(1, 2),
        prefill_chunk_sizes=(4,),
        dtype=dtype,
        device=device,
        compile_options=CompileOptions(backend, None, 1),
        draft_temperatures=(1.0, 1.0),
        show_progress=False,
    )
    with pytest.raises(Stop):
        make_runner(make_model(dtype=torch.float32), options, PhaseClock())
    assert asked == [want]


def step_results(run: Any, weights: StepWeights, *, as_ops: bool) -> dict[str, Tensor]:
    """State and outputs after a prefill chunk for slot 3 and a decode step of slots 1 and 2."""
    state, buffers = run.runner.model.state, run.runner.buffers
    regions = plain_regions(build_regions(run.model.config, state.capacity, as_ops=as_ops))
    model = StepModel(run.model.config, weights, state)
    buffers.prefill.facts.copy_(torch.tensor([3, 0, 13, -1, -1, -1]))
    buffers.prefill.token_ids[:13] = torch.arange(13) + 5
    buffers.rows.slots[:2] = torch.tensor([1, 2])
    buffers.total[0] = 11
    with torch.no_grad():
        prefill_step(regions, model, buffers, 16)
        decode_step(regions, model, buffers, torch.ones(5), 2, 12)
    outputs = {
        "token_ids": buffers.rows.token_ids[:2],
        "num_emitted": buffers.rows.num_emitted[:2],
        "logits": buffers.output.logits[:11],
        "draft_logits": buffers.draft_logits[:2],
        **dict(state.tensors()),
    }
    return {name: tensor.clone() for name, tensor in outputs.items()}


def test_step_on_narrow_weights_equals_the_wide_one(
    make_run: Callable[..., Any], make_prompt: Callable[[int, int], list[int]]
) -> None:
    """Plain torch and native ops, prefill and decode: within float32 rounding of each other."""
    install_native_kernels(BUILD)
    # A seed of its own: the parameters are changed.
    run = make_run(max_num_reqs=3, req_sizes=(3,), dtype=torch.float32, seed=23)
    round_parameters(run.model)
    for slot, length in ((1, 20), (2, 9), (3, 3)):
        run.begin(slot, make_prompt(length, length))
    run.decode([1, 2], 2)
    before = run.snapshot()
    wide = pack_weights(run.model, with_drafter=True)
    narrow = pack_weights(run.model, with_drafter=True, storage=torch.bfloat16)
    assert narrow.head.dtype == torch.bfloat16
    want = step_results(run, wide, as_ops=False)
    assert bool((want["num_emitted"] >= 1).all()) and float(want["logits"].abs().max()) > 0.1
    for weights, as_ops in ((narrow, False), (narrow, True), (wide, True)):
        run.restore(before)
        for name, tensor in step_results(run, weights, as_ops=as_ops).items():
            if tensor.is_floating_point():
                torch.testing.assert_close(tensor, want[name], rtol=1e-5, atol=1e-5, msg=name)
            else:
                assert torch.equal(tensor, want[name]), name
