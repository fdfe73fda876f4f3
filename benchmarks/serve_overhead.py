"""What the server costs: `python -m benchmarks.serve_overhead [--json FILE] [--repeats N]`.

Measures seconds a token of the same eight prompts, decoded by the engine in this process and
through the server as eight streams over loopback to a client in another process. Owns the two
contenders around one runner, which take turns, and the division. Both times go from the first
request to the last token of all, prompts included; the ratio is taken inside a repeat, and every
line gives min / median / max over the repeats. The parts say where the time goes: processor time of
the engine's thread, of the event loop's and of the client, and what the captured graphs took.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from benchmarks.deployments import ALONE, Deployment, start
from benchmarks.machine import describe_machine
from benchmarks.prompts import STORIES, STRUCTURED, encode_prompts
from benchmarks.results import format_rows, save_json
from benchmarks.timing import Spread, interleave, paired_ratio, spread
from decodegrid.configs.load import load_config
from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.server_process import Server

NUM_STREAMS = 8
GOAL = 1.15
"""Most that a token may cost through the server, over what it costs in the engine alone."""
FIRST_SEED = 1000
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the prompts."""

    seconds: float
    num_tokens: int
    num_steps: int
    """Decode steps."""
    graph_s: float
    engine_s: float
    """Processor time of the thread that runs the engine."""
    loop_s: float
    """Of the event loop's; 0 without a server."""
    client_s: float
    """Of the client's process; 0 without a server."""
    texts: tuple[str, ...]


class ServedEngine:
    """A server in a thread of its own, with a client process; as a context manager it ends."""

    def __init__(self, deployment: Deployment, llm: LLM) -> None:
        self._server = Server(deployment.loaded, lambda _: llm)
        self._llm = llm
        self._thread = threading.Thread(target=self._serve, name="event-loop", daemon=True)
        self._thread.start()
        host, port = self._server.address.removeprefix("http://").split(":")
        self._client = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serve_client", host, port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        while self._server.state.health.problem() is not None:
            if not self._thread.is_alive():
                raise RuntimeError("the server ended before it was ready")
            time.sleep(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._client.stdin is not None
        self._client.stdin.close()
        self._client.wait(10)
        self._server.stop()
        self._thread.join()

    def run(self, bodies: Sequence[dict[str, Any]]) -> Pass:
        """Post the bodies and wait for the ends of all. Raises RuntimeError where one fails."""
        assert self._client.stdin is not None and self._client.stdout is not None
        stats, engine = self._llm.stats, _thread("decodegrid-engine")
        before = stats.num_decode_steps, stats.graph_seconds
        clocks = _cpu_s(engine), _cpu_s(self._thread)
        order = {"path": "/v1/completions", "bodies": list(bodies)}
        self._client.stdin.write(json.dumps(order) + "\n")
        self._client.stdin.flush()
        line = self._client.stdout.readline()
        if not line:
            raise RuntimeError("the client failed")
        found = json.loads(line)
        return Pass(
            seconds=found["seconds"],
            num_tokens=found["num_tokens"],
            num_steps=stats.num_decode_steps - before[0],
            graph_s=stats.graph_seconds - before[1],
            engine_s=_cpu_s(engine) - clocks[0],
            loop_s=_cpu_s(self._thread) - clocks[1],
            client_s=found["cpu_s"],
            texts=tuple(found["texts"]),
        )

    def _serve(self) -> None:
        asyncio.run(self._server.run())


def run_engine(llm: LLM, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Pass:
    """The same requests in this thread, as pieces of a stream that somebody reads."""
    stats = llm.stats
    before = stats.num_decode_steps, stats.graph_seconds, time.thread_time()
    params = [
        SamplingParams(
            temperature=0.7, seed=FIRST_SEED + index, max_tokens=max_tokens, ignore_eos=True
        )
        for index in range(len(prompts))
    ]
    texts = [""] * len(prompts)
    num_tokens = 0
    began = time.perf_counter()
    for piece in llm.stream(list(prompts), params):
        texts[piece.index] += piece.text
        num_tokens += len(piece.token_ids)
    return Pass(
        seconds=time.perf_counter() - began,
        num_tokens=num_tokens,
        num_steps=stats.num_decode_steps - before[0],
        graph_s=stats.graph_seconds - before[1],
        engine_s=time.thread_time() - before[2],
        loop_s=0.0,
        client_s=0.0,
        texts=tuple(texts),
    )


def make_bodies(prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[dict[str, Any]]:
    """What run_engine asks for, as requests."""
    return [
        {
            "prompt": list(prompt),
            "temperature": 0.7,
            "seed": FIRST_SEED + index,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for index, prompt in enumerate(prompts)
    ]


def measure(path: Path | None, repeats: int, max_tokens: int) -> dict[str, Any]:
    """Both contenders in turns, after a pass of each that is not counted; prints as it goes.

    Raises ValueError for a deployment with fewer rows than streams.
    """
    deployment = start(load_config(path, (*ALONE, "server.port=0")))
    if deployment.runner.max_num_reqs < NUM_STREAMS:
        raise ValueError(
            f"scheduler.max_num_reqs is {deployment.runner.max_num_reqs}; needs {NUM_STREAMS}"
        )
    tokenizer = deployment.loaded.checkpoint_dir / "tokenizer.json"
    pairs = zip(
        encode_prompts(STRUCTURED, tokenizer), encode_prompts(STORIES, tokenizer), strict=True
    )
    prompts = [prompt for pair in pairs for prompt in pair][:NUM_STREAMS]
    bodies, alone = make_bodies(prompts, max_tokens), deployment.make_llm()
    runs: dict[str, list[Pass]] = {"engine": [], "server": []}
    with ServedEngine(deployment, deployment.make_llm()) as served:
        calls: dict[str, Callable[[], Pass]] = {
            "engine": lambda: run_engine(alone, prompts, max_tokens),
            "server": lambda: served.run(bodies),
        }

        def sampler(name: str) -> Callable[[], float]:
            def sample() -> float:
                runs[name].append(calls[name]())
                return runs[name][-1].seconds

            return sample

        interleave({name: sampler(name) for name in calls}, repeats + 1)
    return {
        **describe_machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_streams": NUM_STREAMS,
        "repeats": repeats,
        "goal": GOAL,
        **summarise({name: found[1:] for name, found in runs.items()}),
        "compilations_after_ready": deployment.runner.counters.compilations_after_ready,
    }


def summarise(runs: dict[str, list[Pass]]) -> dict[str, Any]:
    """The ratio and its parts, printed as well.

    runs: of "engine" and "server", equally many. Raises ValueError where they are not.
    """
    rows: list[tuple[str, Spread, str]] = []
    found: dict[str, Any] = {}
    for name, passes in runs.items():
        values = {
            "us_per_token": spread([one.seconds / one.num_tokens * 1e6 for one in passes]),
            "tokens_per_step": spread([one.num_tokens / one.num_steps for one in passes]),
            "step_ms": spread([one.seconds / one.num_steps * 1e3 for one in passes]),
            "graph_ms": spread([one.graph_s / one.num_steps * 1e3 for one in passes]),
            "engine_cpu_ms": spread([one.engine_s / one.num_steps * 1e3 for one in passes]),
            "loop_cpu_ms": spread([one.loop_s / one.num_steps * 1e3 for one in passes]),
            "client_cpu_ms": spread([one.client_s / one.num_steps * 1e3 for one in passes]),
        }
        units = ("us", "tokens", *["ms a step"] * 5)
        rows += [
            (f"{name}: {key.replace('_', ' ')}", value, unit)
            for (key, value), unit in zip(values.items(), units, strict=True)
        ]
        found[name] = {key: value.as_json() for key, value in values.items()}
    ratio = paired_ratio(
        [one.seconds / one.num_tokens for one in runs["server"]],
        [one.seconds / one.num_tokens for one in runs["engine"]],
    )
    found["server_over_engine"] = ratio.as_json()
    pairs = [
        left == right
        for server, engine in zip(runs["server"], runs["engine"], strict=True)
        for left, right in zip(server.texts, engine.texts, strict=True)
    ]
    found["same_output_share"] = sum(pairs) / len(pairs)
    print(f"\n{NUM_STREAMS} streams, the engine alone and through the server: min / median / max")
    print(format_rows([*rows, ("server over engine: time a token", ratio, "x")]))
    print(f"  streams with the same text in both: {found['same_output_share']:.1%}")
    print(f"  goal: {GOAL}; {'met' if ratio.median <= GOAL else 'MISSED'}")
    return found


def _thread(name: str) -> threading.Thread:
    """The thread of that name; there is one. Raises StopIteration."""
    return next(thread for thread in threading.enumerate() if thread.name == name)


def _cpu_s(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 2 for arguments or a file that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve_overhead", allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--repeats", type=int, default=9, metavar="N")
    parser.add_argument("--config", type=Path, metavar="FILE", help="deployment; default tiny.yaml")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    args = parser.parse_args(argv)
    for name in ("repeats", "max_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    try:
        save_json(measure(args.config, args.repeats, args.max_tokens), args.json)
    except (ValueError, OSError) as error:
        print(f"benchmarks.serve_overhead: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
