"""Names that somebody may write and that no key has: what to write instead.

Owns the table: keys of other engines (vLLM, SGLang, DeepInfer) that have a counterpart here or a
reason why they have none, and, by their dotted names, keys that this project renamed or removed. So
far it renamed none. Data flow: the path of an unknown key -> a sentence for its error, or None.

The names are looked up in any section, with `-` read as `_`.
"""

from types import MappingProxyType
from typing import Final

from decodegrid.configs.yaml_nodes import NodePath

_RATES = "speculation.verify_tokens"
_NO_EAGER = "there is no eager path: every step is a captured graph"
_BY_CHECKPOINT = "the checkpoint's config.json says how its weights are stored"
_SPREAD = "parallel.expert; tensor, pipeline and context parallelism do not exist here"
_PATHS: Final = MappingProxyType(
    {
        "checkpoint_dir": "model.checkpoint",
        "checkpoint_path": "model.checkpoint",
        "model_path": "model.checkpoint",
        "tokenizer": "model.checkpoint, whose directory has the tokenizer.json",
        "tokenizer_path": "model.checkpoint, whose directory has the tokenizer.json",
        "served_model_name": "server.model_name",
        "api_key": "server.api_keys_file, a file with a key on each line",
        "api_keys": "server.api_keys_file, a file with a key on each line",
        "disable_log_requests": "server.log_level",
        "max_num_seqs": "scheduler.max_num_reqs",
        "max_running_requests": "scheduler.max_num_reqs",
        "max_batch_size": "scheduler.max_num_reqs",
        "context_length": "scheduler.max_model_len",
        "max_seq_len": "scheduler.max_model_len",
        "max_seq_len_to_capture": "scheduler.max_model_len",
        "max_num_batched_tokens": "scheduler.prefill_chunk_sizes, the sizes of captured chunks",
        "chunked_prefill_size": "scheduler.prefill_chunk_sizes, the sizes of captured chunks",
        "max_prefill_tokens": "scheduler.prefill_chunk_sizes, the sizes of captured chunks",
        "enable_chunked_prefill": "scheduler.prefill_chunk_sizes; prompts always go in chunks",
        "long_prefill_token_threshold": "scheduler.prefill_chunk_sizes",
        "disable_overlap_schedule": "scheduler.async_scheduling",
        "gpu_memory_utilization": "cache.memory_fraction, a share of what is free once the weights "
        "are loaded",
        "mem_fraction_static": "cache.memory_fraction, a share of what is free once the weights "
        "are loaded",
        "kv_cache_memory_bytes": "cache.pool_bytes",
        "num_gpu_blocks_override": "cache.num_blocks",
        "num_gpu_blocks": "cache.num_blocks",
        "max_total_tokens": "cache.num_blocks or cache.pool_bytes",
        "kv_cache_dtype": "cache.kv_cache",
        "tokens_per_block": "cache.block_size",
        "page_size": "cache.block_size",
        "enable_prefix_caching": "cache.prefix_cache, on or off",
        "disable_radix_cache": "cache.prefix_cache, on or off",
        "num_speculative_tokens": "speculation.num_draft_tokens",
        "speculative_num_draft_tokens": "speculation.num_draft_tokens",
        "speculative_num_steps": "speculation.num_draft_tokens",
        "use_nextn_decode": "speculation.num_draft_tokens",
        "speculative_config": "the section speculation; the drafter is the checkpoint's own",
        "speculative_algorithm": "the section speculation; the drafter is the checkpoint's own",
        "enable_mtp_varlen": _RATES,
        "dflash_confidence_head_temperature": "speculation.confidence_temperatures",
        "cuda_graph_sizes": "grid.num_reqs and grid.num_query_tokens_per_req, or grid.pairs",
        "cudagraph_capture_sizes": "grid.num_reqs and grid.num_query_tokens_per_req, or grid.pairs",
        "cuda_graph_bs": "grid.num_reqs and grid.num_query_tokens_per_req, or grid.pairs",
        "cuda_graph_max_bs": "scheduler.max_num_reqs, whose largest batch always has a graph",
        "compilation_config": "the sections grid and compile",
        "guided_decoding_backend": "the section structured_outputs; the compiler is xgrammar",
        "grammar_backend": "the section structured_outputs; the compiler is xgrammar",
        "structured_outputs_config": "the section structured_outputs",
        "watchdog_timeout": "server.stall_exit_s and dumps.watchdog_s",
        "yoco_prefill_truncation_mode": "prefill.bounded_replay",
        "tensor_parallel_size": _SPREAD,
        "pipeline_parallel_size": _SPREAD,
        "data_parallel_size": _SPREAD,
        "expert_parallel_size": "parallel.expert",
        "enable_expert_parallel": "parallel.expert, a number of processes",
        "tp_size": _SPREAD,
        "pp_size": _SPREAD,
        "dp_size": _SPREAD,
        "ep_size": "parallel.expert",
        "ep": "parallel.expert",
        "cp": _SPREAD,
    }
)
"""Other name -> the key here."""

_REASONS: Final = MappingProxyType(
    {
        "enforce_eager": _NO_EAGER,
        "disable_cuda_graph": _NO_EAGER,
        "quantization": f"{_BY_CHECKPOINT}; model.weights says how they lie in memory",
        "load_format": _BY_CHECKPOINT,
        "trust_remote_code": "no code is loaded from a checkpoint",
        "hf_overrides": "the checkpoint's config.json is taken as it is",
        "download_dir": "nothing is downloaded; model.checkpoint names a directory",
        "seed": "a request has its own seed; one without gets a new one",
        "swap_space": "a request that loses its blocks is computed again",
        "cpu_offload_gb": "weights stay on model.device; model.engram_tables: mapped leaves "
        "tables in the checkpoint's files",
        "max_logprobs": "a step reports up to 20 log-probabilities (grid.rich)",
        "disable_log_stats": "/metrics is always there, and costs a step nothing",
        "enable_metrics": "/metrics is always there, and costs a step nothing",
    }
)
"""Other name -> why there is no such key."""

RENAMED: Final = MappingProxyType[str, str]({})
"""Dotted key of an earlier version of this project -> the key that took its place."""


def say_instead(path: NodePath) -> str | None:
    """What to write instead of an unknown key; None for one that no table has.

    path: of the key, such as ("scheduler", "max_num_seqs").
    """
    dotted, leaf = ".".join(map(str, path)), str(path[-1]).lower().replace("-", "_")
    if dotted in RENAMED:
        return f"renamed; it is now {RENAMED[dotted]}"
    if leaf in _PATHS:
        return f"another engine's name; here it is {_PATHS[leaf]}"
    if leaf in _REASONS:
        return f"another engine's name; {_REASONS[leaf]}"
    return None
