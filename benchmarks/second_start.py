"""Second start: `python -m benchmarks.second_start [--json FILE] [--repeats N] [--cache DIR]`.

Captures a package in this process, with an empty cache unless one is given, so that the regions
that are timed here are those that the compiler has just made. Then measures, each in processes of
their own that take turns: the time from the start of a process to its first token from the package,
over the time to import torch and read the weights; and a packaged step over the same step here.
Owns both ratios and the two questions that a child answers. Both are taken inside a repeat, so that
another load of the machine hits both sides alike.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.results import format_rows, save_json
from benchmarks.timing import Spread, interleave, paired_ratio, spread, time_call
from decodegrid.capture.grid import GraphKey
from decodegrid.capture.package_swap import Staging
from decodegrid.configs.load import LoadedConfig, load_config
from decodegrid.engine.build import build_runner
from decodegrid.engine.package_write import write_package
from decodegrid.engine.runner import Runner
from decodegrid.engine.surface_run import SurfaceRun, context_for, obtain_surface

GOALS = {"first_token_over_torch_and_weights": 1.5, "packaged_over_in_process": 1.1}
READ_WEIGHTS = """
import sys
import torch
from safetensors.torch import load_file
for name in sys.argv[1:]:
    load_file(name)
print("read", flush=True)
"""
PROMPT = "Once upon a time"
REPLAYS = 20
"""Of one sample of a step."""


class StepTimer:
    """Replays of one pair of an idle runner."""

    def __init__(self, runner: Runner, loaded: LoadedConfig) -> None:
        self._work = SurfaceRun(runner, context_for(runner, loaded))
        self._runner = runner

    def seconds(self, key: GraphKey) -> float:
        """Mean of REPLAYS replays, after one that is not counted."""
        self._work.prepare(key)
        self._work.run(key)

        def replays() -> None:
            for _ in range(REPLAYS):
                self._work.run(key)

        return time_call(replays) / REPLAYS


class PackagedSteps:
    """A process that started from a package and times its steps when asked."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.second_start", "--child", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.compilations = int(self._answer())

    def seconds(self, key: GraphKey) -> float:
        """As StepTimer's."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{key.num_reqs} {key.num_query_tokens}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"the packaged process ended with {self._process.wait()}")
        return line


def answer_questions(loaded: LoadedConfig) -> None:
    """The child's side of PackagedSteps."""
    runner = build_runner(loaded)
    timer = StepTimer(runner, loaded)
    print(runner.num_compilations, flush=True)
    for line in sys.stdin:
        print(timer.seconds(GraphKey(*map(int, line.split()))), flush=True)


def first_token_seconds(arguments: Sequence[str], bytecode: Path) -> float:
    """From the start of `decodegrid generate` to its first character.

    Raises ValueError where it says that it compiled something, or fails.
    """
    command = [
        sys.executable, "-m", "decodegrid", "generate", PROMPT, "--max-tokens", "8",
        "--temperature", "0", *arguments,
    ]  # fmt: skip
    seconds, errors = _until_first_character(command, bytecode)
    if "ready: 0 compilations" not in errors:
        raise ValueError(f"the second start compiled: {errors[-2000:]}")
    return seconds


def read_seconds(checkpoint: Path, bytecode: Path) -> float:
    """From the start of a process until it has imported torch and read all of the weights."""
    files = [str(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    return _until_first_character([sys.executable, "-c", READ_WEIGHTS, *files], bytecode)[0]


def _until_first_character(command: Sequence[str], bytecode: Path) -> tuple[float, str]:
    """Seconds, and what the process wrote on standard error; ValueError where it fails.

    bytecode: where Python keeps it. An installed package has it, a checkout may not.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began = perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    seconds = perf_counter() - began
    errors = process.communicate()[1].decode()
    if process.returncode or not first:
        raise ValueError(f"{' '.join(command)} failed: {errors[-2000:]}")
    return seconds, errors


def measure(config: Path | None, cache: Path | None, repeats: int) -> dict[str, Any]:
    """Both ratios; prints them. Raises ValueError for what cannot be used."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="second-start-")))
        cache = place / "cache" if cache is None else cache.resolve()
        settings = [f"compile.cache_dir={cache}", "compile.progress=false"]
        loaded = load_config(config, settings)
        runner = build_runner(loaded)
        surface, _ = obtain_surface(runner, loaded)
        staging = stack.enter_context(Staging(place / "package"))
        write_package(runner, staging, [surface] if surface else [], {})
        # Another, empty cache: all that the children use is the package.
        arguments = ["--package", str(place / "package")]
        arguments += ["--set", f"compile.cache_dir={place / 'empty'}"]
        arguments += ["--set", "compile.progress=false"]
        arguments += [] if config is None else ["--config", str(config)]
        bytecode = place / "bytecode"
        starts = interleave(
            {
                "torch and weights": lambda: read_seconds(loaded.checkpoint_dir, bytecode),
                "first token": lambda: first_token_seconds(arguments, bytecode),
            },
            repeats + 1,  # the first, which writes bytecode, is not counted
        )
        starts = {name: samples[1:] for name, samples in starts.items()}
        packaged = PackagedSteps(arguments)
        stack.callback(packaged.close)
        steps = _steps(StepTimer(runner, loaded), packaged, runner, repeats)
        return {
            **describe_machine(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "repeats": repeats,
            "goals": GOALS,
            "in_process_compilations": runner.num_compilations,
            "packaged_compilations": packaged.compilations,
            **_summary(starts, steps),
        }


def _steps(
    here: StepTimer, packaged: PackagedSteps, runner: Runner, repeats: int
) -> dict[GraphKey, dict[str, list[float]]]:
    """Samples of the smallest and the largest pair, and of one request with all its drafts."""
    keys = {runner.grid.keys[0], runner.grid.largest_key}
    keys |= {GraphKey(1, runner.num_draft_tokens + 1)} & {*runner.grid.keys}
    found = {}
    for key in sorted(keys):

        def sampler(side: StepTimer | PackagedSteps, key: GraphKey) -> Callable[[], float]:
            return lambda: side.seconds(key)

        sides = {"in-process": sampler(here, key), "packaged": sampler(packaged, key)}
        found[key] = interleave(sides, repeats)
    return found


def _summary(
    starts: dict[str, list[float]], steps: dict[GraphKey, dict[str, list[float]]]
) -> dict[str, Any]:
    ratio = paired_ratio(starts["first token"], starts["torch and weights"])
    rows: list[tuple[str, Spread, str]] = [
        (name, spread(samples), "s") for name, samples in starts.items()
    ]
    rows.append(("first token / (torch and weights)", ratio, "x"))
    found: dict[str, Any] = {name: spread(samples).as_json() for name, samples in starts.items()}
    found["first_token_over_torch_and_weights"] = ratio.as_json()
    found["packaged_over_in_process"] = {}
    worst = 0.0
    for key, sides in steps.items():
        step = paired_ratio(sides["packaged"], sides["in-process"])
        worst = max(worst, step.median)
        rows.append((f"step {key}, in-process", spread(sides["in-process"]).scaled(1e3), "ms"))
        rows.append((f"step {key}, packaged / in-process", step, "x"))
        name = f"{key.num_reqs}x{key.num_query_tokens}"
        found["packaged_over_in_process"][name] = step.as_json()
    print("second start: min / median / max")
    print(format_rows(rows))
    reached = zip(GOALS.items(), (ratio.median, worst), strict=True)
    for (name, goal), value in reached:
        print(f"  goal {name}: {goal}; {'met' if value <= goal else 'MISSED'} with {value:.2f}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 2 for arguments or files that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.second_start", allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--repeats", type=int, default=9, metavar="N")
    parser.add_argument("--config", type=Path, metavar="FILE", help="deployment; default tiny.yaml")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="compile cache to start from")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--package", help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    try:
        if args.child:
            package = f"compile.package={json.dumps(args.package)}"
            answer_questions(load_config(args.config, [*args.set, package]))
            return 0
        result = measure(args.config, args.cache, args.repeats)
        save_json(result, args.json)
    except (ValueError, OSError) as error:
        print(f"benchmarks.second_start: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
