"""Lets the target write text for its drafter: `python -m training.write_text --tokens 100000`.

Owns the mix of prompts and temperatures; no drafter is needed. Prompts are of the training side of
the split. Data flow: prompts -> LLM on build/training/export -> prompt and answer as one document
each -> build/training/written.npy and written_answers.npy, in the form of `data.write_stream`.
"""

import argparse
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from decodegrid.engine.sampling_params import SamplingParams
from training.data import Document, write_stream
from training.measure_answers import open_engine
from training.requests import Request, chat_requests, story_requests
from training.run_log import BUILD
from training.vocabulary import Vocabulary

SEED = 20265
TEMPERATURES = (0.6, 0.8, 1.0)
CHATS_PER_STORY = 5
_GROUP = 48
"""Requests that are generated at once."""


def mixed_requests(
    vocabulary: Vocabulary, seed: int, chats_per_story: int = CHATS_PER_STORY
) -> Iterator[Request]:
    """Endless prompts: several chats for each story; CHATS_PER_STORY are as long as it is."""
    stories = list(story_requests(vocabulary, heldout=False))
    Random(f"decodegrid:written:{seed}").shuffle(stories)
    round_number = 0
    while True:
        chats = chat_requests(vocabulary, chats_per_story * len(stories), seed + round_number)
        for story in stories:
            yield from islice(chats, chats_per_story)
            yield story
        round_number += 1


def write(model: Path, num_tokens: int, minutes: float, output: Path, mix: tuple[int, int]) -> int:
    """Generate until there are `num_tokens` answer tokens or the time is over; returns their
    number. `mix`: seed, and chats for each story."""
    vocabulary = Vocabulary.from_file()
    seed, chats_per_story = mix
    requests = mixed_requests(vocabulary, seed, chats_per_story)
    documents: list[Document] = []
    total = 0
    with open_engine(model, 0) as engine:
        began = time.perf_counter()
        while total < num_tokens and time.perf_counter() - began < 60.0 * minutes:
            group = list(islice(requests, _GROUP))
            params = [
                SamplingParams(
                    temperature=TEMPERATURES[(len(documents) + i) % len(TEMPERATURES)],
                    max_tokens=240,
                    seed=seed + len(documents) + i,
                )
                for i in range(len(group))
            ]
            for request, output_of in zip(
                group, engine.generate([list(r.ids) for r in group], params), strict=True
            ):
                answer = output_of.outputs[0].token_ids
                marks = (False,) * len(request.ids) + (True,) * len(answer)
                documents.append(Document(request.kind, (*request.ids, *answer), marks, 0, False))
                total += len(answer)
            print(f"{total} tokens, {time.perf_counter() - began:.0f} s", flush=True)
            write_stream(output, "written", documents)
    return total


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Write text with the target.")
    parser.add_argument("--model", type=Path, default=BUILD / "export")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--output", type=Path, default=BUILD)
    parser.add_argument("--seed", type=int, default=SEED, help="choice of prompts and draws")
    parser.add_argument("--chats-per-story", type=int, default=CHATS_PER_STORY)
    arguments = parser.parse_args()
    mix = (arguments.seed, arguments.chats_per_story)
    write(arguments.model, arguments.tokens, arguments.minutes, arguments.output, mix)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
