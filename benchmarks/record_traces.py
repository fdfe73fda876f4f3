"""Record the batches of real runs, for `decodegrid plan`: `python -m benchmarks.record_traces DIR`.

Owns three loads on the embedded model: one user after another, requests that arrive at random
moments, and a queue that is never empty. Writes a trace each and the step times of the deployment,
which tests/capture/test_plan.py plans with. Measures nothing.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.prompts import STORIES, STRUCTURED, encode_prompts
from decodegrid.capture.plan_trace import write_trace
from decodegrid.configs.load import load_config
from decodegrid.engine.async_llm import AsyncLLM
from decodegrid.engine.grid_trace import GridRecorder
from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.verify_policy import ScheduledVerify

SEED = 7
LOADS = {
    "one_user": "48 requests one after another",
    "arrivals": "60 requests, Poisson, 3 a second",
    "full_queue": "64 requests at once",
}


def make_requests(tokenizer: Path, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of both kinds in turns, with outputs of 16 to 160 tokens."""
    draw = random.Random(SEED)
    pairs = zip(
        encode_prompts(STRUCTURED, tokenizer), encode_prompts(STORIES, tokenizer), strict=True
    )
    prompts = [prompt for pair in pairs for prompt in pair]
    return [
        (
            list(prompts[index % len(prompts)]),
            SamplingParams(temperature=0.7, seed=index, max_tokens=draw.randint(16, 160)),
        )
        for index in range(count)
    ]


async def arrive(engine: AsyncLLM, requests: Sequence[tuple[list[int], SamplingParams]]) -> None:
    """Send each request at its random moment and wait for all."""
    draw, tasks = random.Random(SEED), []
    for prompt, params in requests:
        await asyncio.sleep(draw.expovariate(3.0))
        tasks.append(asyncio.create_task(engine.generate(prompt, params)))
    await asyncio.gather(*tasks)


def run_load(name: str, llm: LLM, tokenizer: Path) -> None:
    """One of LOADS to its end."""
    if name == "one_user":
        for prompt, params in make_requests(tokenizer, 48):
            llm.generate([prompt], params)
    elif name == "full_queue":
        requests = make_requests(tokenizer, 64)
        llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    else:

        async def serve() -> None:
            async with AsyncLLM(llm) as engine:
                await arrive(engine, make_requests(tokenizer, 60))

        asyncio.run(serve())


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files; 2 for a directory that cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record_traces", allow_abbrev=False)
    parser.add_argument("directory", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    loaded = load_config(None)
    tokenizer = loaded.checkpoint_dir / "tokenizer.json"
    llm = LLM(loaded)
    try:
        policy = llm.scheduler.policy
        if not isinstance(policy, ScheduledVerify) or policy.budget.surface is None:
            raise ValueError("the deployment has no step times")
        surface = json.dumps(policy.budget.surface.as_json(), indent=1) + "\n"
        (args.directory / "recorded_surface.json").write_text(surface, encoding="utf-8")
        for name in ("one_user", "full_queue", "arrivals"):  # the last one closes the engine
            stats = llm.stats
            stats.grid = GridRecorder(stats.grid.max_num_reqs, stats.grid.num_draft_tokens)
            run_load(name, llm, tokenizer)
            source = f"recorded: the embedded model, {LOADS[name]}, 16 to 160 tokens, T=0.7"
            write_trace(stats.grid.trace(source), args.directory / f"recorded_{name}.json")
            print(f"{name}: {stats.grid.num_steps} decode steps")
    except (ValueError, OSError) as error:
        print(f"benchmarks.record_traces: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
