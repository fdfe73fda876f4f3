"""Model configs and models that tests of several folders share.

`tiny_raw` is DeepSeek-V4.1 with every part on at 13 M parameters; `small_raw` is the same in 8
layers of 32 channels, for float64 proofs. Both are parsed config.json objects, fresh for each test.
"""

import copy
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from xdist.scheduler import LoadFileScheduling

from decodegrid.capture.grid import build_grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.phases import PhaseClock
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.engine.runner import Runner
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model_config import ModelConfig, parse_model_config
from decodegrid.graphs.random_init import randomise
from decodegrid.graphs.state import Capacity
from decodegrid.kernels.native import build_library, install_native_kernels

NATIVE = Path(__file__).resolve().parents[1] / "build" / "native"

_TINY_TEXT = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 1024,
    "hidden_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 4,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 16,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "compress_rope_theta": 160000,
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8, 10],
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 16,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": [3144, 3424],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 500,
    "engram_n_heads": 2,
    "engram_head_dim": 64,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 768,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 999,
    "dspark_target_layer_ids": [9, 10, 11],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}

# Layers: window, full, reuse, full, full + candidates, reuse, reindex, reuse; two drafter layers.
_SMALL_CHANGES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "max_position_embeddings": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 3, 4],
    "index_source_layer_ids": [1, 3, 4, 6],
    "index_head_dim": 16,
    "index_topk": 6,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 2,
    "engram_layer_ids": [1, 3],
    "engram_num_embeddings": [184, 258],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 41,
    "engram_head_dim": 16,
    "engram_compressed_vocab_size": 64,
    "num_nextn_predict_layers": 2,
    "dspark_noise_token_id": 95,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 8,
    "dspark_n_routed_experts": 4,
}


def _config_json(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "text_config": copy.deepcopy(text),
    }


FUZZ_EXAMPLES = "DECODEGRID_FUZZ_EXAMPLES"
"""Examples of each property test, drawn anew in each run; unset for the few of the suite."""


FIRST = {
    "tests/graphs/test_package_start.py": "compiled",
    "tests/graphs/test_second_start.py": "compiled",
    "tests/graphs/test_compiled_proofs.py": "compiled",
    "tests/graphs/test_cached_compiled.py": "compiled",
    "tests/graphs/test_cached_records.py": "compiled",
    "tests/engine/serve/test_serve_clients.py": "embedded",
    "tests/engine/serve/soak/test_serve_soak.py": "soak over HTTP",
    "tests/engine/test_soak.py": "soak",
}
"""Files that take a minute and more, and what one worker makes for several of them."""


class _Together(LoadFileScheduling):
    """xdist's `loadfile` with groups of files."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return FIRST.get(file, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Where files go to workers, they go in the order of pytest_collection_modifyitems."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return _Together(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers begin with the longest files, so that at the end none waits for another's."""
    if not hasattr(config, "workerinput"):
        return
    files = [item.nodeid.split("::", 1)[0] for item in items]
    counts, place = Counter(files), {file: index for index, file in enumerate(FIRST)}
    keys = [(place.get(file, len(place)), -counts[file], file) for file in files]
    items[:] = [items[index] for index in sorted(range(len(items)), key=keys.__getitem__)]


def _load_fuzz_profile(config: pytest.Config) -> None:
    """How many examples the property tests try; those of the suite are the same in every run."""
    given = os.environ.get(FUZZ_EXAMPLES)
    if not given:
        # Else some of what is drawn comes from the constants in the modules that are imported by
        # then, which depend on the tests before, and so on the number of workers.
        patch = pytest.MonkeyPatch()
        config.add_cleanup(patch.undo)
        patch.setattr(providers, "_get_local_constants", Constants)
    hypothesis.settings.register_profile(
        "decodegrid",
        max_examples=int(given) if given else 12,
        derandomize=not given,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("decodegrid")


def pytest_configure(config: pytest.Config) -> None:
    """Build the native kernels once before several workers would each build them."""
    _load_fuzz_profile(config)
    if config.getoption("numprocesses", None):
        build_library(NATIVE)


@pytest.fixture
def tiny_raw() -> dict[str, Any]:
    """config.json of the 12-layer model."""
    return _config_json(_TINY_TEXT)


@pytest.fixture
def small_raw() -> dict[str, Any]:
    """config.json of the 8-layer model."""
    return _config_json({**_TINY_TEXT, **_SMALL_CHANGES})


@pytest.fixture
def released_raw() -> dict[str, Any]:
    """config.json of deepseek-ai/DeepSeek-V4.1-Flash."""
    path = Path(__file__).resolve().parent / "released_config.json"
    raw: dict[str, Any] = json.loads(path.read_text())
    return raw


@pytest.fixture
def released_config(released_raw: dict[str, Any]) -> ModelConfig:
    """The released config: 43 layers, 763 billion weights."""
    return parse_model_config(released_raw)


@pytest.fixture
def tiny_config(tiny_raw: dict[str, Any]) -> ModelConfig:
    """The 12-layer config."""
    return parse_model_config(tiny_raw)


@pytest.fixture
def small_config(small_raw: dict[str, Any]) -> ModelConfig:
    """The 8-layer config: window 8, top-k 6 (selective from 13 tokens on at ratio 2, 7 at ratio
    1), 4 candidate blocks of 2."""
    return parse_model_config(small_raw)


@pytest.fixture(scope="session")
def make_raw() -> Callable[..., dict[str, Any]]:
    """make_raw(**changes): the small config.json with fields of text_config replaced."""

    def make(**changes: Any) -> dict[str, Any]:
        return _config_json({**_TINY_TEXT, **_SMALL_CHANGES, **changes})

    return make


@pytest.fixture(scope="session")
def make_model(make_raw: Callable[..., dict[str, Any]]) -> Callable[..., DraftModel]:
    """make_model(seed=0, dtype=torch.float64, **changes): a random model of the small config.

    `changes` replace fields of text_config, with JSON values; what comes out is checked as any
    config.json is. No parameter requires a gradient.
    """

    def make(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> DraftModel:
        model = DraftModel(parse_model_config(make_raw(**changes)))
        model.cast(dtype)
        randomise(model, seed)
        return model.requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def layer_changes() -> dict[int, dict[str, Any]]:
    """Changes of the small model, by its number of layers. Two: window and ratio 1 with candidates;
    four: ratio 2 and a reindexing layer beside them. Both have one drafter layer."""
    common = {
        "engram_layer_ids": [1], "engram_num_embeddings": [184], "num_nextn_predict_layers": 1,
    }  # fmt: skip
    two = {
        "num_hidden_layers": 2, "compress_ratios": [0, 1, 0], "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1], "candidate_source_layer_id": 1,
        "dspark_target_layer_ids": [0, 1],
    }  # fmt: skip
    four = {
        "num_hidden_layers": 4, "compress_ratios": [0, 2, 1, 1, 0], "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3], "candidate_source_layer_id": 2,
        "dspark_target_layer_ids": [2, 3],
    }  # fmt: skip
    return {2: {**common, **two}, 4: {**common, **four}}


@pytest.fixture(scope="session")
def native_kernels() -> Path:
    """The directory of the native kernels, which are built there once and installed."""
    install_native_kernels(NATIVE)
    return NATIVE


@pytest.fixture(scope="session")
def make_eager_runner() -> Callable[..., Runner]:
    """make_eager_runner(model, num_reqs=3, max_model_len=64, num_snapshots=0, **capacity): a real
    runner whose regions are not compiled, with two drafts, blocks of 8 tokens for every request at
    its limit, and chunks of 8 and 16. `capacity` replaces fields of Capacity.
    """

    def make(
        model: DraftModel,
        num_reqs: int = 3,
        max_model_len: int = 64,
        num_snapshots: int = 0,
        **capacity: Any,
    ) -> Runner:
        sizes = {
            "num_slots": num_reqs + 1,
            "num_blocks": num_reqs * max_model_len // 8 + 1,
            "block_size": 8,
            "max_model_len": max_model_len,
            "num_draft_tokens": 2,
        }
        options = RunnerOptions(
            capacity=Capacity(**{**sizes, **capacity}),
            grid=build_grid(num_reqs, 2, tuple(sorted({1, min(2, num_reqs), num_reqs}))),
            prefill_chunk_sizes=(8, 16),
            dtype=model.embed.weight.dtype,
            device="cpu",
            compile_options=CompileOptions("none", None, 1),
            draft_temperatures=(1.0, 1.0),
            show_progress=False,
            num_snapshots=num_snapshots,
        )
        return make_runner(model, options, PhaseClock())

    return make
