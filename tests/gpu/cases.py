"""One case of values per tile kernel: tensors as a launch takes them, and what plain torch says.

Owns which function makes the case of an op, for kernels at the sizes that are built; edge cases of
shapes are for the CPU tests. Outputs are poisoned before, and what a kernel must not touch is
expected to be poison afterwards. Needs neither pytest, TileLang nor pydantic.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tests.gpu import cases_products, cases_records, cases_step
from tests.gpu.case_form import Case, Sizes

CASES: Mapping[str, Callable[[Sizes], Case]] = MappingProxyType(
    {
        "cast_fp8": cases_records.cast_fp8,
        "cast_fp8_columns": cases_records.cast_fp8_columns,
        "cast_fp4": cases_records.cast_fp4,
        "store_records": cases_records.store_records,
        "take_records": cases_records.take_records,
        "store_hopper": cases_records.store_hopper,
        "take_hopper": cases_records.take_hopper,
        "convert_index": cases_step.convert_index,
        "expand_ranges": cases_step.expand_ranges,
        "window_index": cases_step.window_index,
        "decode_tokens": cases_step.decode_tokens,
        "split_lengths": cases_step.split_lengths,
        "accept": cases_step.accept,
        "uniform_bits": cases_step.uniform_bits,
        "gumbel_noise": cases_step.gumbel_noise,
        "filter_logits": cases_step.filters,
        "compress_pairs": cases_records.compress_pairs,
        "index_logits": cases_products.index_logits,
        "select_threshold": cases_products.select_threshold,
        "mark_blocks": cases_products.mark_blocks,
        "select_top_k": cases_products.select_top_k,
        "mask_scores": cases_products.mask_scores,
        "block_scores": cases_products.block_scores,
        "sinkhorn": cases_products.sinkhorn_rounds,
        "hc_mix": cases_products.mixer,
        "grouped_fp4": cases_products.grouped_fp4,
        "sparse_mla": cases_products.sparse_mla,
        "sparse_mla_window": cases_products.sparse_mla_window,
    }
)
"""By op; sizes are a kernel's of the table in kernels/tile."""
