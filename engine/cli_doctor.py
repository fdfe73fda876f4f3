"""`decodegrid doctor`: what runs here and with what, and whether it computes the right thing.

Owns what is printed and the exit status: 0 in order, 1 where a proof fails, 2 for bad input.
Imports torch only when it runs.
"""

import argparse
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.cli_options import (
    add_config_options,
    add_package_option,
    load_from_options,
)
from decodegrid.engine.llm import LLM
from decodegrid.engine.terminal_text import printable

EXIT_PROVEN = 0
EXIT_NOT_PROVEN = 1

_VERSION_SECONDS = 20
"""How long a compiler may take to tell its version."""


def add_doctor_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what runs here, and prove what is captured",
        description="Print versions, device, compiler, cache directory and the implementation of "
        "each op. With --self-test start the deployment and prove its captured graphs on this "
        "device: each equals the plain step, pads reach nothing, every batch has a graph, nothing "
        "is compiled later. Exit status: 0 in order, 1 a proof failed, 2 bad input.",
        allow_abbrev=False,
    )
    add_config_options(parser)
    add_package_option(parser)
    parser.add_argument(
        "--self-test", action="store_true", help="start the deployment and prove its graphs"
    )
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    loaded = load_from_options(args)
    # Imported here: the other commands check their arguments before torch is loaded.
    from decodegrid.engine.deployment_check import check_settings

    check_settings(loaded)
    for name, value in facts(loaded):
        _say(name, value)
    if not args.self_test:
        _say_ops(loaded)
        return EXIT_PROVEN
    from decodegrid.engine.build import build_runner
    from decodegrid.engine.proofs import run_proofs

    runner = build_runner(loaded)
    _say_ops(loaded)
    print(runner.start_up_report.splitlines()[-1], flush=True)
    report = run_proofs(runner, loaded.config.speculation.draft_temperatures)
    print(report.format())
    return EXIT_PROVEN if report.ok else EXIT_NOT_PROVEN


def facts(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """(name, value) of versions, device, compiler and cache directory."""
    import torch

    from decodegrid.engine.run_facts import machine, versions

    yield from versions().items()
    device = torch.device(loaded.config.model.device)
    yield "device", str(device)
    yield from machine(device).items()
    yield "compiler", compiler_words(device.type)
    where = loaded.cache_dir
    yield "cache directory", f"{where}{'' if where.is_dir() else ' (not there yet)'}"
    yield "deployment", str(loaded.path)
    yield "package", "none" if loaded.package_dir is None else str(loaded.package_dir)


def compiler_words(device_type: str) -> str:
    """The compiler that start-up uses for a kind of device, with its version, or why there is
    none."""
    if device_type == "cuda":
        try:
            return f"Triton {version('triton')}"
        except PackageNotFoundError:
            return "none: the package triton is not installed"
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        name = str(get_cpp_compiler())
    except RuntimeError as error:  # torch tried every compiler that it knows
        return f"none: {str(error).splitlines()[0]}"
    return f"{name}, {_first_line([name, '--version'])}"


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_VERSION_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"which does not tell its version ({error})"
    return next(iter(done.stdout.splitlines()), f"exit status {done.returncode}")


def op_rows(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """(op, implementation and why) of every op, as steps of the deployment run it.

    Loads and builds no native kernels: those that start-up would take are looked for.
    """
    from decodegrid.capture.package import NATIVE
    from decodegrid.kernels.native import OPS, has_native_kernels, library_path

    name = library_path(Path()).name
    places = [("cache directory", loaded.cache_dir / name)]
    if loaded.package_dir is not None:
        places.insert(0, ("package", loaded.package_dir / NATIVE / name))
    place = next((where for where, path in places if path.exists()), None)
    if loaded.config.model.device != "cpu":
        words = "plain torch: the native kernels are for the CPU"
    elif has_native_kernels():
        words = f"native ({name}, loaded)"
    elif place is not None:
        words = f"native ({name} in the {place})"
    else:
        words = "plain torch: the native kernels are built at the first start"
    for op in OPS:
        yield op, words


def _say_ops(loaded: LoadedConfig) -> None:
    for name, words in op_rows(loaded):
        _say(f"op {name}", words)


def _say(name: str, value: str) -> None:
    print(f"{name:<26} {printable(value)}", flush=True)
