"""Steps on weights that stay packed: against the uncached forward and against expanded weights."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from decodegrid.configs.load import load_config
from decodegrid.engine import build
from decodegrid.engine.build import build_runner
from decodegrid.engine.deployment_check import weight_form
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model_config import ModelConfig, parse_model_config
from decodegrid.graphs.packed_modules import (
    PackedExperts,
    PackedLinear,
    PackedTable,
    pack_table,
    use_packed_modules,
)
from decodegrid.graphs.regions import build_regions
from decodegrid.graphs.regions_layer import RegionSpec
from decodegrid.graphs.state import Capacity
from decodegrid.graphs.step_weights import storage_form
from decodegrid.graphs.weight_packing import pack_weights
from decodegrid.kernels.packed import expand_tiles

# The small config with whole tiles where projections are joined, and whole blocks of 32 inputs.
WHOLE_TILES = MappingProxyType(
    {"moe_intermediate_size": 32, "q_lora_rank": 32, "o_lora_rank": 32, "engram_head_dim": 32}
)
# Two layers, each with an Engram table of its own size, and one drafter layer.
TWO_LAYERS = MappingProxyType(
    {
        **WHOLE_TILES,
        "num_hidden_layers": 2,
        "compress_ratios": [0, 1, 0],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1],
        "candidate_source_layer_id": None,
        "engram_layer_ids": [0, 1],
        "num_nextn_predict_layers": 1,
        "dspark_target_layer_ids": [0, 1],
    }
)
WITH_PACKED_WEIGHTS = ("engram", "attn_in", "attn_out", "index_in", "moe", "draft_context")
FORMS = ("packed_experts", "packed", "table")
Run = Any  # conftest's CachedRun: fixtures hand it out
BuildRun = Callable[..., Run]


def packed_copy(model: DraftModel, form: str) -> DraftModel:
    """The model with packed modules; "table" packs one Engram table alone."""
    packed = copy.deepcopy(model)
    if form == "table":
        layer = model.config.engram_layer_ids[0]
        pack_table(packed, f"layers.{layer}.engram.embed")
    else:
        use_packed_modules(packed, "packed" if form == "packed" else "packed_experts")
    return packed


def expanded_copy(model: DraftModel, packed: DraftModel) -> DraftModel:
    """The float model with the values that the packed one's bytes stand for."""
    expanded = copy.deepcopy(model)
    for name, module in packed.named_modules():
        target = expanded.get_submodule(name)
        if isinstance(module, PackedLinear):
            target.get_parameter("weight").copy_(module.weight)
        elif isinstance(module, PackedTable):
            weight = target.get_parameter("weight")
            weight.copy_(module.rows(torch.arange(len(weight)), weight.dtype))
        elif isinstance(module, PackedExperts):
            w13, w2 = module.packed()
            gate, up = w13.transpose(1, 2).chunk(2, 1)
            for leaf, value in (("w1", gate), ("w3", up), ("w2", w2.transpose(1, 2))):
                target.get_parameter(leaf).copy_(value)
    return expanded


def rounded(model: DraftModel) -> DraftModel:
    """Every parameter on a bfloat16 value, as a quantised checkpoint stores them."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
    return model


@pytest.fixture
def few_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only regions that take packed weights are compiled; the others run as they are."""

    def build_few(
        config: ModelConfig, capacity: Capacity, *, as_ops: bool, kernels: None = None
    ) -> dict[str, RegionSpec]:
        specs = build_regions(config, capacity, as_ops=as_ops)
        assert set(WITH_PACKED_WEIGHTS) <= set(specs)
        return {
            name: item if name in WITH_PACKED_WEIGHTS else replace(item, opaque=True)
            for name, item in specs.items()
        }

    monkeypatch.setattr(build, "build_regions", build_few)


def generate(run: Run, prompts: Sequence[list[int]], seed: int) -> list[list[int]]:
    """Chunked prefill and decode steps of random totals for all prompts; every text."""
    draw, slots = random.Random(seed), list(range(1, len(prompts) + 1))
    for slot, prompt in zip(slots, prompts, strict=True):
        run.begin(slot, prompt, [draw.randint(1, 16) for _ in range(8)])
    for step in range(10):
        # Drafts of the text that will come would need a trained drafter; these are tried and fail.
        if step % 3 == 0:
            run.force_drafts(1, [draw.randrange(96) for _ in range(5)])
        run.decode(slots, draw.randint(len(slots), 6 * len(slots)))
    return [run.emitted(slot) for slot in slots]


@pytest.mark.parametrize("form", FORMS)
def test_packed_steps_equal_the_uncached_forward_and_expanded_steps(
    form: str,
    make_model: Callable[..., DraftModel],
    new_run: BuildRun,
    make_prompt: Callable[[int, int], list[int]],
) -> None:
    """float64, plain functions: logits within 1e-9, and the expanded model's tokens."""
    model = make_model(hc_sinkhorn_iters=2, **WHOLE_TILES)
    packed = packed_copy(model, form)
    expanded = expanded_copy(model, packed)
    prompts = [make_prompt(length, length) for length in (33, 6, 19)]
    ids = torch.tensor(prompts[0])
    assert torch.equal(packed.logits(ids), expanded.logits(ids))
    assert not torch.equal(packed.logits(ids), model.logits(ids))
    run = new_run(packed, 5, 3, (1, 3))
    texts = generate(run, prompts, 0)
    run.check_greedy()
    assert run.verified > 3 * 10
    plain = new_run(expanded, 5, 3, (1, 3))
    assert generate(plain, prompts, 0) == texts
    assert torch.equal(packed.logits(ids), expanded.logits(ids))


@pytest.mark.parametrize("form", ["packed_experts", "packed"])
def test_traced_packed_steps_in_float64(
    form: str,
    make_model: Callable[..., DraftModel],
    new_run: BuildRun,
    make_prompt: Callable[[int, int], list[int]],
    native_kernels: Path,
    few_compilations: None,
) -> None:
    """Regions trace whole with lists of codes and scales, symbolic table rows included."""
    packed = packed_copy(make_model(hc_sinkhorn_iters=2, **TWO_LAYERS), form)
    run = new_run(packed, 5, 3, (1, 3), backend="eager")
    generate(run, [make_prompt(length, length) for length in (33, 6, 19)], 1)
    run.check_greedy()
    counters = run.runner.counters
    assert counters.num_compilations == counters.planned_compilations == len(WITH_PACKED_WEIGHTS)


def test_compiled_packed_steps(
    make_model: Callable[..., DraftModel],
    new_run: BuildRun,
    make_prompt: Callable[[int, int], list[int]],
    native_kernels: Path,
    few_compilations: None,
    tmp_path: Path,
) -> None:
    """float32 through inductor and the native kernels; a second start compiles nothing."""
    model = rounded(make_model(dtype=torch.float32, hc_sinkhorn_iters=2, **TWO_LAYERS))
    model.head.weight.mul_(4.0)  # choices as clear as a trained model's
    packed = packed_copy(model, "packed")
    run = new_run(packed, 5, 3, (1, 3), backend="inductor", cache_dir=tmp_path)
    assert run.runner.model.weights.head.dtype == torch.bfloat16
    exact = copy.deepcopy(packed)
    exact.cast(torch.float64)
    run.oracle = exact
    prompts = [make_prompt(length, length) for length in (33, 6, 19)]
    texts = generate(run, prompts, 2)
    assert run.worst_difference() <= 1e-3
    for slot in run.texts:
        reference = run.reference_logits(slot)
        best = reference.topk(2).values
        sure = best[:, 0] - best[:, 1] > 2e-3
        assert bool(sure.any())
        emitted = torch.tensor(run.emitted(slot))
        assert torch.equal(emitted[sure], reference.argmax(-1)[sure])
    counters = run.runner.counters
    assert counters.num_compilations == counters.planned_compilations == len(WITH_PACKED_WEIGHTS)
    again = new_run(packed, 5, 3, (1, 3), backend="inductor", cache_dir=tmp_path)
    assert generate(again, prompts, 2) == texts
    counters = again.runner.counters
    assert (counters.num_compilations, counters.num_loaded) == (0, counters.planned_compilations)


def test_joined_bytes_stand_for_the_joined_values(make_model: Callable[..., DraftModel]) -> None:
    model = make_model(dtype=torch.float32, **WHOLE_TILES)
    packed = packed_copy(model, "packed")
    expanded = pack_weights(expanded_copy(model, packed), with_drafter=True)
    weights = pack_weights(packed, with_drafter=True)

    def assert_same(form: Any, want: Tensor) -> None:
        codes, scales = form
        assert codes.dtype == scales.dtype == torch.uint8
        assert torch.equal(expand_tiles(codes, scales), want)

    layers = (*weights.layers, *weights.draft_layers)
    for layer, other in zip(layers, (*expanded.layers, *expanded.draft_layers), strict=True):
        for name in ("w_in", "wq_b", "wo_a", "wo_b"):
            assert_same(getattr(layer.attention, name), getattr(other.attention, name))
        for name in ("shared_w13", "shared_w2"):
            assert_same(getattr(layer.moe, name), getattr(other.moe, name))
        if layer.index is not None and other.index is not None:
            assert_same(layer.index.wq_b, other.index.wq_b)
    assert weights.draft_head is not None and expanded.draft_head is not None
    assert_same(weights.draft_head.main_proj, expanded.draft_head.main_proj)
    source, same = weights.layers[1].source, expanded.layers[1].source
    assert source is not None and same is not None
    assert isinstance(source.w_in, Tensor) and torch.equal(source.w_in, same.w_in)


def test_packed_experts_are_held_once(make_model: Callable[..., DraftModel]) -> None:
    """The model's own bytes become views of the joined ones, and its forward stays as it was."""
    packed = packed_copy(make_model(dtype=torch.float32, **WHOLE_TILES), "packed_experts")
    ids = torch.arange(20)
    before = packed.logits(ids)
    weights = pack_weights(packed, with_drafter=True)
    for block, layer in zip(packed.blocks, weights.layers, strict=True):
        experts: Any = block.ffn.experts
        joined = layer.moe.w13
        for index, part in enumerate(("codes", "scales")):
            for name in (f"w1_{part}", f"w3_{part}"):
                own = getattr(experts, name).untyped_storage()
                assert own.data_ptr() == joined[index].untyped_storage().data_ptr()
    assert torch.equal(packed.logits(ids), before)


@pytest.mark.parametrize("field", ["q_lora_rank", "o_lora_rank"])
def test_a_join_inside_a_tile_is_refused(
    make_model: Callable[..., DraftModel], field: str
) -> None:
    model = make_model(dtype=torch.float32, **{**WHOLE_TILES, field: 48})
    packed = packed_copy(model, "packed")
    with pytest.raises(ValueError, match=rf"text_config\.{field} is 48; .* multiple of 32"):
        pack_weights(packed, with_drafter=True)
    pack_weights(packed_copy(model, "packed_experts"), with_drafter=True)


def test_forms_of_storage_have_names_of_their_own(make_model: Callable[..., DraftModel]) -> None:
    """Code for one form is not taken for another; floats keep the one word that they had."""
    model = rounded(make_model(dtype=torch.float32, **WHOLE_TILES))

    def form(model: DraftModel, storage: torch.dtype | None = None) -> str:
        return storage_form(pack_weights(model, with_drafter=True, storage=storage))

    assert form(model) == "torch.float32"
    assert form(model, torch.bfloat16) == "torch.bfloat16"
    experts = packed_copy(model, "packed_experts")
    assert form(experts, torch.bfloat16) == "torch.bfloat16, w13 packed, w2 packed"
    assert form(packed_copy(model, "table")) == "torch.float32, table packed"
    everything = form(packed_copy(model, "packed"), torch.bfloat16)
    for name in ("w_in", "wq_b", "wo_a", "wo_b", "shared_w13", "shared_w2", "wkv", "main_proj"):
        assert f"{name} packed" in everything
    for name in ("head", "wk", "markov_head"):
        assert f", {name} packed" not in everything


def small_config(make_raw: Callable[..., dict[str, Any]], *, quantized: bool) -> ModelConfig:
    raw = make_raw(**WHOLE_TILES)
    if quantized:
        raw["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        }
    return parse_model_config(raw)


@pytest.mark.parametrize(
    ("asked", "device", "quantized", "want"),
    [
        ("auto", "cpu", True, "expanded"),
        ("auto", "cuda", True, "packed"),
        ("auto", "cuda", False, "expanded"),
        ("auto", "cpu", False, "expanded"),
        ("packed", "cpu", True, "packed"),
        ("packed_experts", "cuda", True, "packed_experts"),
        ("packed", "cpu", False, "packed"),
        ("expanded", "cuda", True, "expanded"),
    ],
)
def test_form_that_a_deployment_means(
    make_raw: Callable[..., dict[str, Any]], asked: str, device: str, quantized: bool, want: str
) -> None:
    """What is asked for is asked of the loader, which refuses to pack floats."""
    config = load_config(None, [f"model.weights={asked}", f"model.device={device}"]).config
    assert weight_form(config, small_config(make_raw, quantized=quantized)) == want


def test_start_up_hands_the_settings_to_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Stop(Exception):
        """Start-up has asked for its model."""

    def record(*args: Any, **settings: Any) -> None:
        asked.append(settings)
        raise Stop

    monkeypatch.setattr(build, "load_model", record)
    loaded = load_config(None, ["model.engram_tables=mapped", "compile.progress=false"])
    with pytest.raises(Stop):
        build_runner(loaded)
    assert asked == [{"weights": "expanded", "engram_tables": "mapped", "progress": False}]
