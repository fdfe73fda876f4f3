"""Compares the calls that we recorded with the real packages: `make check-libraries`.

Owns the download of the wheels into a folder of its own, with the pip of a virtual environment of
its own, and the reading of their sources. Nothing of them is installed or imported: signatures are
read from syntax trees, and only the two functions of DeepGEMM that order weights are run, cut out
of their module, on random numbers beside ours.

Data flow: wheels -> signatures -> comparison with kernels/providers/signatures.json ->
library_check.json beside this file, which is committed. With --record the signatures are written
anew instead.
"""

import argparse
import ast
import json
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
SIGNATURES = ROOT / "kernels" / "providers" / "signatures.json"
RESULT = Path(__file__).resolve().parent / "library_check.json"
BUILD = ROOT / "build" / "libraries"


@dataclass(frozen=True, slots=True)
class Library:
    """One package version whose calls are recorded."""

    name: str
    distribution: str
    version: str
    calls: Mapping[str, str]
    """Dotted call -> "file:function" or "file:Class.method" in the wheel."""

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.distribution}=={self.version}"


_GEMM = "deep_gemm/__init__.py"
_MEGA = "deep_gemm/mega/__init__.py"
DEEP_GEMM = {
    name: f"{_GEMM}:{name}"
    for name in (
        "bf16_gemm_nt", "fp8_fp4_gemm_nt", "einsum", "fp8_einsum", "tf32_hc_prenorm_gemm",
        "m_grouped_bf16_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous",
        "m_grouped_fp8_fp4_gemm_nt_masked", "get_paged_mqa_logits_metadata",
        "fp8_fp4_paged_mqa_logits", "fp8_fp4_mqa_logits", "bf16_mega_gate",
    )
} | {
    "fp8_fp4_mega_moe": f"{_MEGA}:fp8_fp4_mega_moe",
    "mega.get_symm_buffer_for_mega_moe": f"{_MEGA}:get_symm_buffer_for_mega_moe",
}  # fmt: skip
_MLA = "flash_mla/flash_mla_interface.py"
_EP = "deep_ep/buffers/elastic.py"

LIBRARIES = (
    Library("deep_gemm", "sgl-deep-gemm", "0.2.2", DEEP_GEMM),
    Library("deep_gemm", "sgl-deep-gemm", "0.2.5", DEEP_GEMM),
    Library(
        "flash_mla", "sgl-flash-mla", "1.0.0",
        {
            "flash_mla_with_kvcache": f"{_MLA}:flash_mla_with_kvcache",
            "flash_mla_sparse_fwd": f"{_MLA}:flash_mla_sparse_fwd",
            "FlashMLASchedMeta": f"{_MLA}:FlashMLASchedMeta",
        },
    ),
    Library(
        "deep_ep", "sgl-deep-ep", "0.1.2.post1",
        {
            "ElasticBuffer": f"{_EP}:ElasticBuffer.__init__",
            "ElasticBuffer.dispatch": f"{_EP}:ElasticBuffer.dispatch",
            "ElasticBuffer.combine": f"{_EP}:ElasticBuffer.combine",
            "ElasticBuffer.destroy": f"{_EP}:ElasticBuffer.destroy",
        },
    ),
    Library(
        "deep_select", "tokenspeed-deepselect", "1.0.0.post20260910",
        {"topk": "deep_select/interface.py:topk"},
    ),
    Library(
        "tile_kernels", "tile-kernels", "2.1.0",
        {
            "quant.per_token_cast": "tile_kernels/quant/per_token_cast_kernel.py:per_token_cast",
            "quant.swiglu_forward_and_per_token_cast":
                "tile_kernels/quant/swiglu_forward_kernel.py:swiglu_forward_and_per_token_cast",
            "moe.moe_topk_gate_forward":
                "tile_kernels/moe/moe_topk_gate_forward_kernel.py:moe_topk_gate_forward",
        },
    ),
)  # fmt: skip


class CheckError(Exception):
    """What keeps the check from running; its text is for the user."""


def parameters(arguments: ast.arguments, *, is_method: bool) -> str:
    """Names in order, "=..." behind those with a default; without `self`."""
    plain = [*arguments.posonlyargs, *arguments.args]
    first_default = len(plain) - len(arguments.defaults)
    parts = [
        item.arg + ("=..." if place >= first_default else "") for place, item in enumerate(plain)
    ]
    if is_method:
        parts = parts[1:]
    if arguments.vararg is not None:
        parts.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        parts.append("*")
    for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parts.append(item.arg + ("=..." if default is not None else ""))
    if arguments.kwarg is not None:
        parts.append(f"**{arguments.kwarg.arg}")
    return ", ".join(parts)


def find_definition(tree: ast.Module, qualified: str) -> ast.FunctionDef | ast.ClassDef:
    """A function, class or method, wherever it stands in its module. Raises CheckError."""
    name, _, method = qualified.partition(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            if not method:
                return node
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == method:
                    return inner
    raise CheckError(f"no {qualified}")


def signature(source: str, qualified: str) -> str:
    """Parameters of a definition; of a dataclass those of its fields."""
    found = find_definition(ast.parse(source), qualified)
    if isinstance(found, ast.FunctionDef):
        return parameters(found.args, is_method="." in qualified)
    fields = [item for item in found.body if isinstance(item, ast.AnnAssign)]
    names = [f"{ast.unparse(item.target)}{'=...' if item.value else ''}" for item in fields]
    return ", ".join(names)


def fetch(library: Library, pip: Path, folder: Path) -> zipfile.ZipFile:
    """The wheel of a library, downloaded unless it is there. Raises CheckError."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{library.distribution.replace('-', '_')}-{library.version}-"
    if not list(folder.glob(f"{stem}*.whl")):
        command = [
            str(pip), "download", "-q", "--no-deps", "--only-binary", ":all:",
            "--ignore-requires-python", "-d", str(folder), library.requirement,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise CheckError(f"{library.requirement}: {lines[-1] if lines else 'no wheel'}")
    return zipfile.ZipFile(next(folder.glob(f"{stem}*.whl")))


def read_calls(library: Library, wheel: zipfile.ZipFile) -> dict[str, str]:
    """Signature of each call; "absent" for one that the wheel does not have."""
    found = {}
    for call, place in library.calls.items():
        path, _, qualified = place.partition(":")
        try:
            found[call] = signature(wheel.read(path).decode(), qualified)
        except (KeyError, CheckError):
            found[call] = "absent"
    return found


def run_function(source: str, name: str, *args: Any) -> Any:
    """Cut a function of plain torch out of its module and call it."""
    node = find_definition(ast.parse(source), name)
    module = ast.Module([node], [])
    space: dict[str, Any] = {"torch": torch}
    exec(compile(module, name, "exec"), space)
    return space[name](*args)


def check_layouts(wheel: zipfile.ZipFile) -> dict[str, str]:
    """Our orders of weights and scales beside the library's own, on random numbers."""
    from decodegrid.kernels.providers import layouts

    source = wheel.read(_MEGA).decode()
    generator = torch.Generator().manual_seed(0)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(0, 2**31, shape, generator=generator).to(torch.int32)

    rows, scales = words(3, 256, 5), layouts.mn_major(words(3, 256, 5))
    pairs = {
        "interleave_gate_up": (
            layouts.interleave_gate_up(rows), run_function(source, "_interleave_weights", rows),
        ),
        "utccp_scales": (
            layouts.utccp_scales(scales), run_function(source, "_transpose_sf_for_utccp", scales),
        ),
    }  # fmt: skip
    packed = torch.randint(1, 254, (7, 8), generator=generator, dtype=torch.uint8)
    floats = (packed.to(torch.int32) << 23).view(torch.float32)
    math = wheel.read("deep_gemm/utils/math.py").decode()
    pairs["scale_words"] = (
        layouts.scale_words(packed), run_function(math, "pack_ue8m0_to_int", floats),
    )  # fmt: skip
    return {
        name: "same" if torch.equal(ours, theirs) and ours.stride() == theirs.stride() else "other"
        for name, (ours, theirs) in pairs.items()
    }


def compare(recorded: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str]:
    """Per call "same", or both sides."""
    return {
        call: "same" if recorded.get(call) == text else f"recorded {recorded.get(call)!r}: {text!r}"
        for call, text in found.items()
    }


def differences(result: Mapping[str, Any]) -> Iterator[str]:
    """Lines for what is not the same."""
    for requirement, found in result["libraries"].items():
        for call, words in found.items():
            if words != "same":
                yield f"{requirement} {call}: {words}"
    for name, words in result["layouts"].items():
        if words != "same":
            yield f"layout {name}: {words}"


def main(argv: Sequence[str] | None = None) -> int:
    """1 where something differs, 2 where the check cannot run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--record", action="store_true", help="write the signatures anew")
    parser.add_argument("--build", type=Path, default=BUILD, metavar="DIR")
    args = parser.parse_args(argv)
    environment = args.build / "venv"
    try:
        if not (environment / "bin" / "pip").exists():
            venv.create(environment, with_pip=True)
        found, layouts = {}, {}
        for library in LIBRARIES:
            with fetch(library, environment / "bin" / "pip", args.build / "wheels") as wheel:
                found[library.requirement] = read_calls(library, wheel)
                if library.name == "deep_gemm":
                    layouts = check_layouts(wheel)
    except (CheckError, OSError, zipfile.BadZipFile) as error:
        print(f"check-libraries: error: {error}", file=sys.stderr)
        return 2
    if args.record:
        names = {library.requirement: library.name for library in LIBRARIES}
        recorded = {key: {"import": names[key], "calls": calls} for key, calls in found.items()}
        SIGNATURES.write_text(json.dumps(recorded, indent=1) + "\n")
    known = json.loads(SIGNATURES.read_text())
    result = {
        "libraries": {
            key: compare(known.get(key, {}).get("calls", {}), calls) for key, calls in found.items()
        },
        "layouts": layouts,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    lines = list(differences(result))
    print("\n".join(lines) or f"{len(found)} packages, all calls as recorded")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
