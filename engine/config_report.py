"""The parts of the report of `decodegrid config check`, as JSON values.

Owns the names of the fields. Data flow: findings and plans -> plain objects, which
engine/config_format.py makes lines of.
"""

from typing import Any

from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.capture_plan import CapturePlan, RegionCounts, graph_bytes
from decodegrid.engine.deployment_findings import Findings
from decodegrid.engine.memory_plan import POOLS, MemoryPlan
from decodegrid.engine.pool_size import max_concurrency
from decodegrid.graphs.cache_sizes import record_sizes, state_sizes, token_bytes
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.graphs.state import Capacity

_NOT_COUNTED = {
    "cpu": "not counted: intermediate results of a step, generated code, Python and torch",
    "cuda": "not counted: the pool of intermediate results that all graphs share and CUDA's own "
    "memory of each graph (known after capture: the ledger of `decodegrid profile`), CUDA's "
    "context and the libraries' workspaces",
}
_EXCHANGE = "; and the buffers of the exchange between processes"


def plan_report(plan: CapturePlan, regions: RegionCounts | None) -> dict[str, Any]:
    """What is captured and compiled; regions: None where the model is not known."""
    pairs = [[key.num_reqs, key.num_query_tokens] for key in plan.grid.keys]
    compiled = None
    if regions is not None:
        compiled = {
            "compiled": regions.compiled,
            "compilations": regions.compilations,
            "opaque": regions.opaque,
        }
    return {
        "pairs": sorted(pairs),
        "variants": [str(variant) for variant in plan.variants],
        "prefill_sizes": list(plan.prefill_sizes),
        "num_graphs": plan.num_graphs,
        "regions": compiled,
    }


def coverage_report(plan: CapturePlan) -> dict[str, Any]:
    """The theorem about the grid, and the batch that breaks it."""
    return {
        "batches": plan.coverage.num_batches,
        "max_num_reqs": plan.grid.max_num_reqs,
        "max_query_tokens_per_req": plan.grid.num_draft_tokens + 1,
        "problem": plan.coverage.problem,
    }


def memory_report(
    loaded: LoadedConfig,
    model: ModelConfig,
    capacity: Capacity,
    memory: MemoryPlan,
    notes: list[str],
) -> dict[str, Any]:
    """Bytes of one process by pool and part, and what the pool holds."""
    config = loaded.config
    device, num_processes = config.model.device, config.parallel.expert
    dtype = memory.buffers.target.stream.dtype
    sizes = state_sizes(model, capacity, dtype)
    records = record_sizes(model, capacity.kv_cache, dtype)
    return {
        "device": device,
        "processes": num_processes,
        "total_bytes": memory.total_bytes,
        "start_up_bytes": memory.start_up_bytes if num_processes == 1 else None,
        "pools": {pool: memory.pool_bytes(pool) for pool in POOLS if memory.pool_bytes(pool)},
        "parts": [
            {
                "pool": part.pool,
                "what": part.what,
                "bytes": part.each,
                "shared_by": part.divided_by,
                "place": part.place,
            }
            for part in memory.parts
        ],
        "kv": {
            "blocks": capacity.num_blocks,
            "tokens": (capacity.num_blocks - 1) * capacity.block_size,
            "bytes_per_token": token_bytes(model, records),
            "bytes_per_request": sizes.request,
            "max_concurrency": round(max_concurrency(capacity), 2),
        },
        "host": {"grammar_cache_bytes": _grammar_bytes(loaded)},
        "not_counted": _NOT_COUNTED[device] + (_EXCHANGE if num_processes > 1 else ""),
        "notes": notes,
    }


def _grammar_bytes(loaded: LoadedConfig) -> int:
    return loaded.config.structured_outputs.cache_bytes if loaded.config.grid.rich else 0


def graphs_report(
    plan: CapturePlan, memory: MemoryPlan, capacity: Capacity
) -> list[dict[str, Any]]:
    """Static buffers of every graph, in the order of the captures."""
    return [
        {"graph": str(key), "static_bytes": graph_bytes(key, memory.buffers, capacity)}
        for key in plan.graph_keys()
    ]


def findings_report(found: Findings, problems: list[str]) -> dict[str, Any]:
    """What is refused, doubted and not known."""
    return {
        "problems": problems,
        "warnings": found.warnings,
        "not_checked": found.not_checked,
    }
