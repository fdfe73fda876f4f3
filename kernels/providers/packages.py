"""The optional libraries that kernels may come from, and how they would be installed.

Owns the facts of each: the distribution whose calls were recorded in `signatures.json` (several
forks share an import name), the oldest version that has all of them, the devices that it has
kernels for, and the calls without which it is of no use. Asks nothing and imports nothing.

Source: the packages' metadata and sources; DeepInfer's requirements.
"""

from decodegrid.kernels.providers.probe import Package, Target

HOPPER_AND_NEWER = frozenset({Target.SM90, Target.SM100})
BLACKWELL = frozenset({Target.SM100})

DEEP_GEMM = Package(
    name="deep_gemm",
    distributions=("sgl-deep-gemm",),
    minimum=(0, 2, 2),
    targets=HOPPER_AND_NEWER,
    attributes=(
        "bf16_gemm_nt", "fp8_fp4_gemm_nt", "m_grouped_fp8_fp4_gemm_nt_contiguous",
        "m_grouped_bf16_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_masked", "fp8_einsum",
        "einsum", "get_paged_mqa_logits_metadata", "fp8_fp4_paged_mqa_logits",
        "fp8_fp4_mqa_logits", "tf32_hc_prenorm_gemm", "fp8_fp4_mega_moe",
        "mega.get_symm_buffer_for_mega_moe",
    ),
    install="pip install --no-deps sgl-deep-gemm (0.2.2 with torch 2.13, 0.2.5 with torch 2.14)",
)  # fmt: skip
FLASH_MLA = Package(
    name="flash_mla",
    distributions=("sgl-flash-mla",),
    minimum=(1, 0, 0),
    targets=HOPPER_AND_NEWER,
    attributes=("flash_mla_with_kvcache", "flash_mla_sparse_fwd", "FlashMLASchedMeta"),
    install="pip install --no-deps sgl-flash-mla",
)
DEEP_EP = Package(
    name="deep_ep",
    distributions=("sgl-deep-ep",),
    minimum=(0, 1, 2),
    targets=HOPPER_AND_NEWER,
    attributes=("ElasticBuffer",),
    install="pip install --no-deps sgl-deep-ep (with torch 2.14.1)",
)
DEEP_SELECT = Package(
    name="deep_select",
    distributions=("tokenspeed-deepselect",),
    minimum=(1, 0, 0),
    targets=BLACKWELL,
    attributes=("topk",),
    install="pip install --no-deps tokenspeed-deepselect",
)
TILE_KERNELS = Package(
    name="tile_kernels",
    distributions=("tile-kernels",),
    minimum=(2, 1, 0),
    targets=HOPPER_AND_NEWER,
    attributes=("quant.per_token_cast", "moe.moe_topk_gate_forward"),
    install="pip install tile-kernels (Python 3.12, tilelang 0.1.15)",
)
CUDA_PYTHON = Package(
    name="cuda",
    distributions=("cuda-bindings", "cuda-core", "cuda-pathfinder", "cuda-python"),
    minimum=(12, 6),
    targets=HOPPER_AND_NEWER,
    attributes=("cuLaunchKernel", "cuModuleLoadData"),
    install="pip install cuda-bindings",
    imported="cuda.bindings.driver",
)
"""What launches our own kernels, which were built beforehand."""

PACKAGES = (DEEP_GEMM, FLASH_MLA, DEEP_EP, DEEP_SELECT, TILE_KERNELS, CUDA_PYTHON)
