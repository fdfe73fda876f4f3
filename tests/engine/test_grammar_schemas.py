"""300 random schemas with random prompts on a small real model with drafts: every output validates.

The model has random weights and draws at temperature 1, so that only the masks make its text valid.
Validity is judged by jsonschema, which shares nothing with the engine.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import pytest
import torch

from decodegrid.capture.grid import build_grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.phases import PhaseClock
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.engine.grammar_params import StructuredOutputsParams
from decodegrid.engine.llm import LLM
from decodegrid.engine.request_output import RequestOutput
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.graphs.state import Capacity

NUM_PAIRS = 300
NUM_PLANTED = 30
NUM_SPACED = 12
"""Pairs whose texts may hold any whitespace, of which the model makes a lot."""
DRAFTS = 2
MAX_REQS = 31
LENGTH = 256
FREE_PROMPT = (20, 33, 47, 20, 61)


class SchemaMaker:
    """Random schemas with texts of bounded length."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._defs: dict[str, Any] = {}

    def make(self, depth: int) -> dict[str, Any]:
        self._defs = {"leaf": self._leaf(), "pair": self._object(0)}
        schema = self._draw.choice([self._object, self._object, self._array, self._any])(depth)
        return {"$defs": self._defs, **schema} if "$ref" not in schema else self._defs["pair"]

    def _part(self, depth: int) -> dict[str, Any]:
        kinds: list[Callable[[], dict[str, Any]]] = [self._leaf] * 4
        if depth:
            kinds += [lambda: self._object(depth - 1), lambda: self._array(depth - 1)]
            kinds += [lambda: self._any(depth - 1)]
            kinds += [lambda: {"$ref": self._draw.choice(["#/$defs/leaf", "#/$defs/pair"])}]
        return self._draw.choice(kinds)()

    def _leaf(self) -> dict[str, Any]:
        draw = self._draw
        low = draw.randint(-50, 50)
        most = draw.randint(1, 4)
        return draw.choice(
            [
                {"type": "boolean"},
                {"type": "null"},
                {"const": draw.choice(["x\ny", 3, None, ["a", 1], {"k": "v"}])},
                {"enum": draw.sample(["red", "gr\u00fcn", 'a"b', 7, -1.5, True, None], 3)},
                {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 500)},
                {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 9},
                {"type": "string", "minLength": draw.randint(0, most), "maxLength": most},
                {"type": "string", "pattern": draw.choice(["^[A-Z]{2}-\\d{2}$", "^(ab|c){1,3}$"])},
                {"type": "string", "format": draw.choice(["date", "ipv4"])},
                {"type": ["boolean", "null"], "description": "either"},
            ]
        )

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._draw.sample(["a", "id", "na me", "tag", "z\u00e9"], self._draw.randint(1, 3))
        required = [name for name in names if self._draw.random() < 0.6]
        properties = {name: self._part(depth) for name in names}
        return {"type": "object", "properties": properties, "required": required}

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._draw.randint(0, 2)
        if self._draw.random() < 0.3:
            items = [self._part(depth) for _ in range(least + 1)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": least}
        most = least + self._draw.randint(0, 2)
        return {"type": "array", "items": self._part(depth), "minItems": least, "maxItems": most}

    def _any(self, depth: int) -> dict[str, Any]:
        if self._draw.random() < 0.5:
            return {"anyOf": [self._part(depth), self._leaf()]}
        return {"oneOf": [{"type": "null"}, {"const": "only"}, {"type": "boolean"}]}


@dataclass
class Planter:
    """Replaces the drafts of a step's rows by what is known to follow, some of it changed: on the
    device and in what the host is told, which makes the masks from it."""

    runner: Any
    texts: dict[int, Sequence[int]]
    """Whole texts by the seed of their requests."""

    def install(self) -> None:
        self.seeds: dict[int, int] = {}
        self._start, self._collect = self.runner.start, self.runner.collect
        self.runner.start, self.runner.collect = self._note, self._plant

    def remove(self) -> None:
        self.runner.start, self.runner.collect = self._start, self._collect

    def _note(self, slot: int, request: Any, block_ids: Sequence[int]) -> None:
        self.seeds[slot] = request.seed
        self._start(slot, request, block_ids)

    def _plant(self, step: Any) -> Any:
        result = self._collect(step)
        slots = self.runner.model.state.slots
        drafts = result.drafts.copy()
        for row, slot in enumerate(step.slots):
            done = int(slots.seq_len[slot])
            right = list(self.texts[self.seeds[slot]][done : done + DRAFTS])
            right += [2] * (DRAFTS - len(right))
            if (done + slot) % 4 == 0:
                right[done % DRAFTS] = 100
            drafts[row] = right
            slots.drafts[slot, :DRAFTS] = torch.tensor(right)
        return replace(result, drafts=drafts)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm(
    make_model: Callable[..., Any],
    layer_changes: dict[int, dict[str, Any]],
    tokenizer: Tokenizer,
) -> LLM:
    options = RunnerOptions(
        capacity=Capacity(
            MAX_REQS + 1, 1 + MAX_REQS * LENGTH // 32, 32, LENGTH, DRAFTS, "coupled", rich=True
        ),
        grid=build_grid(MAX_REQS, DRAFTS, (MAX_REQS,)),
        prefill_chunk_sizes=(4,),
        dtype=torch.float64,
        device="cpu",
        compile_options=CompileOptions("none", None, 1),
        draft_temperatures=(1.0,) * DRAFTS,
        show_progress=False,
    )
    model = make_model(vocab_size=tokenizer.vocab_size, **layer_changes[2], hc_sinkhorn_iters=1)
    runner = make_runner(model, options, PhaseClock())
    return LLM.from_runner(runner, tokenizer, decode_steps_per_prefill_chunk=0)


@dataclass(frozen=True)
class Pair:
    schema: dict[str, Any]
    prompt: list[int]
    params: SamplingParams


def make_pairs() -> list[Pair]:
    maker, draw = SchemaMaker(7), random.Random(8)
    pairs = []
    for index in range(NUM_PAIRS):
        is_spaced = index < NUM_SPACED
        schema = maker.make(0 if is_spaced else draw.choice([0, 0, 1, 1, 2]))
        form = StructuredOutputsParams(json=schema, disable_any_whitespace=not is_spaced)
        prompt = [draw.randrange(10, 266) for _ in range(draw.randint(1, 5))]
        params = SamplingParams(max_tokens=None, seed=index, structured_outputs=form)
        pairs.append(Pair(schema, prompt, params))
    return pairs


def test_random_schemas_validate_and_a_free_request_beside_them_is_unchanged(
    llm: LLM, tokenizer: Tokenizer
) -> None:
    pairs = make_pairs()
    free = SamplingParams(max_tokens=60, seed=NUM_PAIRS, ignore_eos=True)
    alone = llm.generate([list(FREE_PROMPT)], free)[0].outputs[0]
    prompts = [list(FREE_PROMPT), *(pair.prompt for pair in pairs)]
    outputs = llm.generate(prompts, [free, *(pair.params for pair in pairs)])
    assert outputs[0].outputs[0].token_ids == alone.token_ids
    for pair, output in zip(pairs, outputs[1:], strict=True):
        assert_valid(pair, output, tokenizer)
    assert sum(output.num_verified for output in outputs[1:]) > NUM_PAIRS
    # Drafts that are right, wrong in each place, and behind the end: the same tokens.
    chosen = [(pair, output) for pair, output in zip(pairs, outputs[1:], strict=True)][:NUM_PLANTED]
    runner: Any = llm.stream_table.loop.runner
    texts = {pair.params.seed: [*pair.prompt, *output.outputs[0].token_ids]
             for pair, output in chosen}  # fmt: skip
    planter = Planter(runner, texts)
    planter.install()
    try:
        again = llm.generate(
            [pair.prompt for pair, _ in chosen], [pair.params for pair, _ in chosen]
        )
    finally:
        planter.remove()
    for (_, before), now in zip(chosen, again, strict=True):
        assert now.outputs[0].token_ids == before.outputs[0].token_ids
    assert sum(output.num_accepted for output in again) > 5 * NUM_PLANTED


def assert_valid(pair: Pair, output: RequestOutput, tokenizer: Tokenizer) -> None:
    made = output.outputs[0]
    assert made.finish_reason == "stop", (pair.schema, made)
    assert tokenizer.decode(made.token_ids) == made.text
    jsonschema.validate(json.loads(made.text), pair.schema)
