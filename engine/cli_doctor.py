"""`decodegrid doctor`: what runs here and with what, and whether it computes the right thing.

Owns what is printed and the exit status: 0 in order, 1 where a proof fails, 2 for bad input. The
table of kernels comes from doctor_kernels.py. Imports torch only when it runs.
"""

import argparse
import json
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.cli_options import (
    add_config_options,
    add_package_option,
    load_from_options,
)
from decodegrid.engine.llm import LLM
from decodegrid.engine.terminal_text import printable

if TYPE_CHECKING:
    from decodegrid.kernels.providers.registry import KernelTable

EXIT_PROVEN = 0
EXIT_NOT_PROVEN = 1

_VERSION_SECONDS = 20
"""How long a compiler may take to tell its version."""


def add_doctor_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what runs here, and prove what is captured",
        description="Print versions, device, compiler, cache directory and the implementation of "
        "each op, with the reason why not another and what to install for it. With --self-test "
        "start the deployment and prove its captured graphs on this device: each equals the plain "
        "step, pads reach nothing, every batch has a graph, nothing is compiled later. Exit "
        "status: 0 in order, 1 a proof failed, 2 bad input.",
        allow_abbrev=False,
    )
    add_config_options(parser)
    add_package_option(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--self-test", action="store_true", help="start the deployment and prove its graphs"
    )
    form.add_argument(
        "--json", action="store_true", help="the same as one JSON object: facts, ops, libraries"
    )
    parser.add_argument(
        "--target",
        choices=("cpu", "sm90", "sm100"),
        help="the kernels of another kind of device, as if its libraries were installed: sm90 is "
        "Hopper, sm100 Blackwell (default: the deployment's own device)",
    )
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    loaded = load_from_options(args)
    # Imported here: the other commands check their arguments before torch is loaded.
    from decodegrid.engine.deployment_check import check_settings

    model = check_settings(loaded)
    from decodegrid.engine.doctor_kernels import in_steps, kernel_table

    if args.json:
        table = kernel_table(loaded, model, args.target)
        known = {"facts": dict(facts(loaded)), "in_steps": in_steps(table)}
        print(json.dumps({**known, **table.as_json()}, indent=2))
        return EXIT_PROVEN
    for name, value in facts(loaded):
        _say(name, value)
    if not args.self_test:
        _say_kernels(kernel_table(loaded, model, args.target))
        return EXIT_PROVEN
    from decodegrid.engine.build import build_runner
    from decodegrid.engine.proofs import run_proofs

    runner = build_runner(loaded)
    # Behind the start, so that it says which native kernels were loaded.
    _say_kernels(kernel_table(loaded, model, args.target))
    print(runner.start_up_report.splitlines()[-1], flush=True)
    report = run_proofs(runner, runner.draft_temperatures)
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


def _say_kernels(table: "KernelTable") -> None:
    from decodegrid.engine.doctor_kernels import table_lines

    for name, words in table_lines(table):
        _say(name, words)


def _say(name: str, value: str) -> None:
    print(f"{name:<26} {printable(value)}", flush=True)
