"""The prefix cache benchmark: `python -m benchmarks.prefix [--json FILE] [--repeats N]`.

Measures the time to the first token of prompts that share their first tokens, in three ways that
take turns on one runner: "hit", behind a prefix that an earlier request computed; "miss", with the
cache on and a prefix that nobody had; "off", without a cache. Owns the prompts, the order of the
measurements and the printing. Token ids are random, which costs a step what text does. Ratios are
taken inside a repeat and mean something where the machine does nothing else meanwhile.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.deployments import start
from benchmarks.machine import describe_machine
from benchmarks.results import format_rows, save_json
from benchmarks.timing import interleave, paired_ratio, spread
from decodegrid.configs.load import load_config
from decodegrid.engine.admission import EngineLimits, build_request
from decodegrid.engine.engine_loop import EngineLoop
from decodegrid.engine.prefix_cache import PrefixStats
from decodegrid.engine.runner_protocol import StepRunner
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.scheduler import Scheduler
from decodegrid.engine.stats import EngineStats

GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
LEAST_ID = 20
"""Above the special tokens that a DeepSeek vocabulary begins with."""


class FirstTokens:
    """Times of first tokens on a loop of its own around a shared runner."""

    def __init__(self, runner: StepRunner, *, is_cached: bool) -> None:
        limits = EngineLimits.of(runner)
        if not is_cached:
            limits = replace(limits, num_snapshots=0)
        self._limits = limits
        self._scheduler = Scheduler(limits)
        self._loop = EngineLoop(runner, self._scheduler, EngineStats(runner))
        self._count = 0

    @property
    def stats(self) -> PrefixStats:
        """Of a cached one."""
        assert self._scheduler.prefix is not None
        return self._scheduler.prefix.stats

    def seconds(self, prompt: Sequence[int]) -> float:
        """From adding a prompt to its first token; the request has ended afterwards."""
        name = str(self._count)
        self._count += 1
        request = build_request(name, prompt, GREEDY, seed=0, eos_token_id=1, limits=self._limits)
        began = perf_counter()
        self._loop.add(request)
        while request.num_output_tokens == 0:
            self._loop.step()
        seconds = perf_counter() - began
        while self._loop.has_unfinished:
            self._loop.step()
        return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; 2 for arguments or a file that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix", allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--config", type=Path, metavar="FILE", help="deployment; default tiny.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--repeats", type=int, default=15, metavar="N")
    parser.add_argument("--prefix", type=int, default=512, metavar="N", help="shared tokens")
    parser.add_argument("--suffix", type=int, default=16, metavar="N", help="tokens behind them")
    args = parser.parse_args(argv)
    for name in ("repeats", "prefix", "suffix"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    try:
        result = measure(args.config, tuple(args.set), args.repeats, args.prefix, args.suffix)
        save_json(result, args.json)
    except (ValueError, OSError) as error:
        print(f"benchmarks.prefix: error: {error}", file=sys.stderr)
        return 2
    return 0


def measure(
    path: Path | None, overrides: tuple[str, ...], repeats: int, num_prefix: int, num_suffix: int
) -> dict[str, Any]:
    """Start the deployment, let the three take turns, print and return the result.

    Raises ValueError for a deployment without a prefix cache, RequestError (one too) for prompts
    that it cannot hold.
    """
    machine = describe_machine()
    print(f"{machine['cpu_model']}, {machine['versions']}")
    runner = start(load_config(path, overrides)).runner
    if runner.num_snapshots == 0:
        raise ValueError("cache.prefix_cache is off in this deployment")
    draw, top = random.Random(0), runner.vocab_size

    def ids(count: int) -> list[int]:
        return [draw.randrange(min(LEAST_ID, top - 1), top) for _ in range(count)]

    cached, plain = FirstTokens(runner, is_cached=True), FirstTokens(runner, is_cached=False)
    shared = ids(num_prefix)
    contenders: dict[str, Callable[[], float]] = {
        "hit": lambda: cached.seconds(shared + ids(num_suffix)),
        "miss": lambda: cached.seconds(ids(num_prefix + num_suffix)),
        "off": lambda: plain.seconds(ids(num_prefix + num_suffix)),
    }
    for call in contenders.values():  # the first one of all leaves the prefix behind
        call()
    warm = replace(cached.stats)
    samples = interleave(contenders, repeats)
    return {
        **machine,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_prefix_tokens": num_prefix,
        "num_suffix_tokens": num_suffix,
        **report_samples(samples, warm, cached.stats),
    }


def report_samples(
    samples: dict[str, list[float]], warm: PrefixStats, stats: PrefixStats
) -> dict[str, Any]:
    """Print the spreads and ratios; warm: the counts before the first sample."""
    found = {name: spread(seconds).scaled(1e3) for name, seconds in samples.items()}
    left = paired_ratio(samples["hit"], samples["miss"])
    cost = paired_ratio(samples["miss"], samples["off"])
    hits = (stats.num_tokens_hit - warm.num_tokens_hit) / len(samples["hit"])
    rate = (stats.num_tokens_hit - warm.num_tokens_hit) / (stats.num_tokens - warm.num_tokens)
    print("\ntime to the first token: min / median / max")
    rows = [(name, value, "ms") for name, value in found.items()]
    print(format_rows([*rows, ("hit / miss", left, "x"), ("miss / off", cost, "x")]))
    print(
        f"a hit saves {1 - left.median:.1%}; the cache costs a miss {cost.median - 1:+.1%}; "
        f"{hits:.0f} tokens cached a hit, hit rate {rate:.1%}"
    )
    return {
        "first_token_ms": {name: value.median for name, value in found.items()},
        "hit_saves": 1 - left.median,
        "miss_costs": cost.median - 1,
        "tokens_a_hit": hits,
        "hit_rate": rate,
        "details": {
            **{name: value.as_json() for name, value in found.items()},
            "hit_over_miss": left.as_json(),
            "miss_over_off": cost.as_json(),
        },
    }


if __name__ == "__main__":
    raise SystemExit(main())
