"""decodegrid: a PyTorch graph-compiled decode engine for DeepSeek-V4.1 models.

Owns the version, the package path and the public names; holds no logic. The public names are
loaded on first use, so that `import decodegrid` stays cheap and imports no torch.
"""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decodegrid.engine.async_llm import AsyncLLM
    from decodegrid.engine.grammar_params import StructuredOutputsParams
    from decodegrid.engine.llm import LLM
    from decodegrid.engine.request_output import RequestOutput
    from decodegrid.engine.sampling_params import SamplingParams
    from decodegrid.graphs.checkpoint import load_model

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "load_model",
]

if not (_Path(__file__).parent / "engine").is_dir():
    # A checkout, not a wheel: engine/, graphs/ and the rest stand one level up.
    __path__.append(str(_Path(__file__).parent.parent))


def __getattr__(name: str) -> object:
    match name:
        case "AsyncLLM":
            module = "decodegrid.engine.async_llm"
        case "LLM":
            module = "decodegrid.engine.llm"
        case "RequestOutput":
            module = "decodegrid.engine.request_output"
        case "SamplingParams":
            module = "decodegrid.engine.sampling_params"
        case "StructuredOutputsParams":
            module = "decodegrid.engine.grammar_params"
        case "load_model":
            module = "decodegrid.graphs.checkpoint"
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
