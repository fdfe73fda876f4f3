"""Measures a checkpoint's answers through the engine: `python -m training.measure_answers`.

Owns the figures that need text the model writes itself: the share of templated answers that parse,
the share of values copied from the prompt, and the tokens that a request gains in one round of
drafts, by domain and temperature. Data flow: held-out requests -> LLM -> answers -> `Answers` ->
build/training/answers.json.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from decodegrid.configs.load import load_config
from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams
from training.requests import KINDS, Request, Score, heldout_requests, score, story_requests
from training.run_log import BUILD, ROOT
from training.vocabulary import Vocabulary

SEED = 20264
TEMPERATURES = (0.0, 0.6, 1.0)
_NUM_REQS = 16
_NUM_DRAFTS = 5


@dataclass(frozen=True, slots=True)
class Answers:
    """Figures of one checkpoint."""

    parsed: dict[str, float]
    """Kind of request, or "all" -> share of greedy answers that parse."""
    copied: dict[str, float]
    """The same -> share of the prompt's values that stand in the answer."""
    tokens_per_round: dict[str, dict[str, float]]
    """Domain -> temperature -> tokens a decode step, with rejection sampling."""
    accepted: dict[str, dict[str, list[float]]]
    """Domain -> temperature -> share accepted of the drafts that were reached, by slot."""
    most_per_round: dict[str, dict[str, float]]
    """Domain -> temperature -> tokens a decode step of the same answers, were every draft right."""


def shares(kinds: list[str], scores: list[Score]) -> tuple[dict[str, float], dict[str, float]]:
    """Parsed and copied shares by kind and over all."""
    parsed, copied = {}, {}
    for kind in ("all", *KINDS):
        chosen = [s for k, s in zip(kinds, scores, strict=True) if kind in ("all", k)]
        parsed[kind] = round(sum(s.parsed for s in chosen) / len(chosen), 4)
        total = sum(s.total for s in chosen)
        copied[kind] = round(sum(s.copied for s in chosen) / total, 4)
    return parsed, copied


def open_engine(checkpoint: Path, num_drafts: int) -> LLM:
    """An engine on the checkpoint that verifies every draft by rejection sampling."""
    overrides = [
        f"model.checkpoint={checkpoint.resolve()}",
        f"speculation.num_draft_tokens={num_drafts}",
        "speculation.verify=rejection",
        "speculation.verify_tokens=all",
        f"scheduler.max_num_reqs={_NUM_REQS}",
        f"grid.num_reqs=[{_NUM_REQS}]",
        f"grid.num_query_tokens_per_req=[{num_drafts + 1}]",
        "scheduler.max_model_len=2048",
        "compile.progress=false",
        "surface.repeats=0",
    ]
    return LLM(load_config(ROOT / "configs" / "tiny.yaml", overrides))


def most_a_round(lengths: Sequence[int], num_drafts: int) -> float:
    """Tokens a round where every draft is accepted: the last round of an answer is cut short."""
    rounds = sum(-(-length // (num_drafts + 1)) for length in lengths)
    return round(sum(lengths) / rounds, 3)


def measure_rounds(
    engine: LLM, requests: list[Request], temperature: float, max_tokens: int
) -> tuple[float, list[float], list[tuple[int, ...]]]:
    """Tokens a round, accepted shares by slot, and the answers' ids."""
    stats = engine.stats
    before = (stats.num_emitted, stats.num_decode_rows)
    reached, accepted = stats.reached_per_position, stats.accepted_per_position
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=SEED + index)
        for index in range(len(requests))
    ]
    outputs = engine.generate([list(request.ids) for request in requests], params)
    rounds = stats.num_decode_rows - before[1]
    rates = [
        round((after - start) / max(now - then, 1), 4)
        for after, start, now, then in zip(
            stats.accepted_per_position, accepted, stats.reached_per_position, reached, strict=True
        )
    ]
    gained = round((stats.num_emitted - before[0]) / rounds, 3)
    return gained, rates, [output.outputs[0].token_ids for output in outputs]


def measure(checkpoint: Path, num_templated: int, num_stories: int) -> Answers:
    """All figures of a checkpoint."""
    vocabulary = Vocabulary.from_file()
    templated = heldout_requests(vocabulary, num_templated, SEED)
    stories = list(islice(story_requests(vocabulary, heldout=True), num_stories))
    gained: dict[str, dict[str, float]] = {}
    accepted: dict[str, dict[str, list[float]]] = {}
    most: dict[str, dict[str, float]] = {}
    scores: list[Score] = []
    with open_engine(checkpoint, _NUM_DRAFTS) as engine:
        for domain, requests in (("structured", templated), ("stories", stories)):
            for temperature in TEMPERATURES:
                found = measure_rounds(engine, requests, temperature, 160)
                gained.setdefault(domain, {})[f"{temperature:g}"] = found[0]
                accepted.setdefault(domain, {})[f"{temperature:g}"] = found[1]
                bound = most_a_round([len(ids) for ids in found[2]], _NUM_DRAFTS)
                most.setdefault(domain, {})[f"{temperature:g}"] = bound
                if domain == "structured" and temperature == 0.0:
                    texts = [_text(vocabulary, ids) for ids in found[2]]
                    scores = [score(r, t) for r, t in zip(requests, texts, strict=True)]
    parsed, copied = shares([request.kind for request in templated], scores)
    return Answers(parsed, copied, gained, accepted, most)


def _text(vocabulary: Vocabulary, ids: tuple[int, ...]) -> str:
    kept = ids[:-1] if ids and ids[-1] == vocabulary.ids.eos else ids
    return vocabulary.decode(list(kept))


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Measure the embedded model's answers.")
    parser.add_argument("--model", type=Path, default=BUILD / "export")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--stories", type=int, default=16)
    parser.add_argument("--output", type=Path, default=BUILD / "answers.json")
    arguments = parser.parse_args()
    answers = measure(arguments.model, arguments.requests, arguments.stories)
    text = json.dumps(asdict(answers), indent=1) + "\n"
    print(text, flush=True)
    arguments.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
