"""The fused experts' buffers for the models of a run; Blackwell alone.

What `decodegrid.engine.cuda_kernels` makes for a deployment's one model, made here for several at
once: what a process has installed is installed for all of them.
"""

from collections.abc import Sequence
from typing import Any

from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.state import Capacity
from decodegrid.graphs.step_buffers import MIN_ROWS
from decodegrid.kernels.providers.deep_gemm_experts import (
    Buffers,
    MegaMoe,
    OneRank,
    make_mega_buffer,
)
from tests.gpu.scene import MAX_CHUNK

Model = tuple[ModelConfig, Capacity]


def expert_rows(model: ModelConfig, capacity: Capacity) -> dict[tuple[int, int], int]:
    """Most rows of a call by (experts, experts of a token), of target and drafter."""
    rows = max(capacity.num_slots - 1, MIN_ROWS)
    tokens = max(rows * (capacity.num_draft_tokens + 1), MAX_CHUNK, MIN_ROWS)
    found = {(model.n_routed_experts, model.num_experts_per_tok): tokens}
    if capacity.num_draft_tokens:
        key = model.dspark_n_routed_experts, model.dspark_num_experts_per_tok
        found[key] = max(found.get(key, 0), rows * model.dspark_block_size)
    return found


def expert_buffers(module: Any, models: Sequence[Model]) -> Buffers:
    """Buffers of all models; synchronises, so before any capture.

    module: DeepGEMM. Raises ValueError where two models have the same numbers of experts: the op
    could not tell them apart.
    """
    buffers: dict[tuple[int, int], MegaMoe] = {}
    for model, capacity in models:
        for key, rows in expert_rows(model, capacity).items():
            if key in buffers:
                raise ValueError(f"two models with {key[0]} experts, {key[1]} of a token")
            sizes = (model.hidden_size, model.moe_intermediate_size)
            buffer = make_mega_buffer(module, OneRank(), key[0], rows, key[1], *sizes)
            buffers[key] = MegaMoe(buffer, model.swiglu_limit)
    return buffers
