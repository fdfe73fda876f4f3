"""Every sampling parameter, with drafts of any kind, alone and in a batch, against the definition.

The engine decodes with a small float64 model. The oracle asks the uncached `model.logits` for each
token anew and applies the parameters in plain numpy; of the project's own code it uses the noise
alone, whose formula other tests hold. Drafts are written into the slots before each step.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decodegrid.capture.grid import build_grid
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.phases import PhaseClock
from decodegrid.engine.build import RunnerOptions, make_runner
from decodegrid.engine.llm import LLM
from decodegrid.engine.logprobs import TokenLogprobs
from decodegrid.engine.request_output import CompletionOutput
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.graphs.state import Capacity, VerifyMode
from decodegrid.kernels.sampling import gumbel_noise

DRAFTS = 3
MAX_REQS = 4
EOS = 1
COUNT = 9
PROMPT = [129, 33, 47, 20, 49]
KINDS = ("none", "right", "wrong", "random", "own")
LIKELY = slice(9, None, 40)
"""Ids that the model chooses from most of the time, so that its texts repeat some."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Truth:
    """What the oracle says of one request."""

    tokens: list[int]
    raw: list[Floats]
    """Log-softmax of the model's own logits at each token."""
    reason: str


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max()
    found: Floats = shifted - np.log(np.exp(shifted).sum())
    return found


def adjusted(
    logits: Floats, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> Floats:
    """Bias, penalties and bars, id by id, in vLLM's order."""
    found = logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        found[token] += bias
    for token in {*prompt, *output}:
        if found[token] > 0:
            found[token] /= params.repetition_penalty
        else:
            found[token] *= params.repetition_penalty
    for token, count in Counter(output).items():
        found[token] -= params.frequency_penalty * count
        found[token] -= params.presence_penalty
    if len(output) < params.min_tokens:
        found[[EOS, *params.stop_token_ids]] = -np.inf
    return found


def filtered(logits: Floats, params: SamplingParams) -> Floats:
    """Temperature, then what min_p leaves, then top_p of its mass and top_k of its number."""
    scaled = logits / params.temperature
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    weights = np.exp(scaled - scaled.max())
    kept = [token for token in order if weights[token] >= params.min_p]
    mass = sum(weights[token] for token in kept)
    found, before = np.full_like(scaled, -np.inf), 0.0
    for rank, token in enumerate(kept):
        is_out = before > params.top_p * mass or 0 < params.top_k <= rank
        if rank == 0 or not is_out:
            found[token] = scaled[token]
        before += weights[token]
    return found


def choose(logits: Floats, params: SamplingParams, seed: int, position: int) -> int:
    if params.temperature == 0:
        return int(logits.argmax())
    noise = gumbel_noise(
        torch.tensor([seed]), torch.tensor([position]), torch.tensor([1.0]), len(logits)
    )
    return int((filtered(logits, params) + noise[0].double().numpy()).argmax())


class Oracle:
    """One token at a time from the uncached model, each text asked for once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._logits: dict[tuple[int, ...], Floats] = {}

    def logits(self, text: Sequence[int]) -> Floats:
        key = tuple(text)
        if key not in self._logits:
            found = self._model.logits(torch.tensor(key))[-1]
            self._logits[key] = found.double().numpy()
        return self._logits[key]

    def truth(
        self, prompt: Sequence[int], params: SamplingParams, *, reads_prompt: bool = True
    ) -> Truth:
        """reads_prompt: whether the repetition penalty looks at the prompt, as it has to."""
        assert params.seed is not None and params.max_tokens is not None
        output: list[int] = []
        raw: list[Floats] = []
        while len(output) < params.max_tokens:
            text = [*prompt, *output]
            logits = self.logits(text)
            raw.append(log_softmax(logits))
            wanted = adjusted(logits, params, prompt if reads_prompt else (), output)
            output.append(choose(wanted, params, params.seed, len(text)))
            is_eos = output[-1] == EOS and not params.ignore_eos
            if is_eos or output[-1] in params.stop_token_ids:
                return Truth(output, raw, "stop")
        return Truth(output, raw, "length")


class Planter:
    """Stands before the runner and replaces the drafts of its slots before each step."""

    def __init__(self, runner: Any) -> None:
        self._state = runner.model.state.slots
        self._vocab = runner.vocab_size
        self._seeds: dict[int, int] = {}
        self._draw = random.Random(0)
        self.kind = "own"
        self.texts: dict[int, list[int]] = {}
        """Whole texts to come, by the seed of their requests."""
        start = runner.start

        def start_and_note(slot: int, request: Any, block_ids: Sequence[int]) -> None:
            self._seeds[slot] = request.seed
            start(slot, request, block_ids)

        runner.start = start_and_note
        for name in ("launch", "launch_forward"):
            setattr(runner, name, self._planting(getattr(runner, name)))

    def _planting(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def plant_and_launch(slots: Sequence[int], total: int) -> Any:
            if self.kind not in ("none", "own"):
                for slot in slots:
                    self._plant(slot)
            return launch(slots, total)

        return plant_and_launch

    def _plant(self, slot: int) -> None:
        length = int(self._state.seq_len[slot])
        right = self.texts[self._seeds[slot]][length : length + DRAFTS]
        right += [0] * (DRAFTS - len(right))
        drafts = right
        if self.kind == "wrong":
            drafts = [(token + 1) % self._vocab for token in right]
        elif self.kind == "random":
            drafts = [
                token if self._draw.random() < 0.6 else self._draw.randrange(self._vocab)
                for token in right
            ]
        self._state.drafts[slot, :DRAFTS] = torch.tensor(drafts)


@dataclass
class Setup:
    llm: LLM
    oracle: Oracle
    planter: Planter


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(
    model: Any, tokenizer: Tokenizer, verify: VerifyMode, *, async_scheduling: bool = False
) -> Setup:
    capacity = Capacity(MAX_REQS + 1, 1 + 8 * MAX_REQS, 8, 64, DRAFTS, verify, rich=True)
    options = RunnerOptions(
        capacity=capacity,
        grid=build_grid(MAX_REQS, DRAFTS, (1, MAX_REQS)),
        prefill_chunk_sizes=(4,),
        dtype=torch.float64,
        device="cpu",
        compile_options=CompileOptions("none", None, 1),
        draft_temperatures=(1.0,) * DRAFTS,
        show_progress=False,
    )
    runner = make_runner(model, options, PhaseClock())
    planter = Planter(runner)
    llm = LLM.from_runner(runner, tokenizer, async_scheduling=async_scheduling)
    return Setup(llm, Oracle(model), planter)


@pytest.fixture(scope="module")
def model(
    make_model: Callable[..., Any],
    layer_changes: dict[int, dict[str, Any]],
    tokenizer: Tokenizer,
) -> Any:
    made = make_model(vocab_size=tokenizer.vocab_size, **layer_changes[2], hc_sinkhorn_iters=2)
    made.head.weight[LIKELY] *= 3.0
    return made


@pytest.fixture(scope="module")
def setup(model: Any, tokenizer: Tokenizer) -> Setup:
    return build(model, tokenizer, "coupled")


PLAIN = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
STOPS = tuple(range(100, 266))
"""More than the slot row has room for, so that most of them are the host's."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "min_p": {"min_p": 0.5},
    "min_p with top_p and top_k": {"min_p": 0.05, "top_p": 0.75, "top_k": 6},
    "presence": {"presence_penalty": 2.0},
    "negative presence": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 1.5},
    "negative frequency": {"frequency_penalty": -0.75},
    "repetition": {"repetition_penalty": 1.75},
    "repetition below 1": {"repetition_penalty": 0.5},
    "bias": {"logit_bias": {token: (-100, 3.5, 0, 1.25)[token % 4] for token in range(266)}},
    "bias weakened by repetition": {
        "logit_bias": {token: (-2.0, 3.5, 0, 1.25)[token % 4] for token in range(266)},
        "repetition_penalty": 1.8,
    },
    "bias beyond all": {"logit_bias": {200: 100}},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": STOPS, "ignore_eos": False},
    "min_tokens beside bias": {
        "min_tokens": 5,
        "ignore_eos": False,
        "logit_bias": {EOS: 100},
    },
    "logprobs": {"logprobs": 4},
    "own logprob only": {"logprobs": 0},
    "everything": {
        "min_p": 0.01,
        "top_p": 0.95,
        "top_k": 40,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.25,
        "logit_bias": {7: 4.0, 150: -100},
        "min_tokens": 6,
        "stop_token_ids": STOPS[:60],
        "logprobs": 20,
    },
}
GREEDY_IS_PLAIN = {"min_p", "min_p with top_p and top_k", "logprobs", "own logprob only"}
"""Parameters that leave greedy decoding as it is."""


def params_of(name: str, temperature: float) -> SamplingParams:
    """A seed for each case, by which the planter knows its text."""
    seed = 1000 + list(CASES).index(name) + (500 if temperature else 0)
    changes = {"temperature": temperature, "seed": seed, **CASES[name]}
    return replace(PLAIN, **changes)


def check(found: CompletionOutput, truth: Truth, params: SamplingParams) -> None:
    assert list(found.token_ids) == truth.tokens
    assert found.finish_reason == truth.reason
    if params.logprobs is None:
        assert found.logprobs is None and found.cumulative_logprob is None
        return
    assert found.logprobs is not None and len(found.logprobs) == len(truth.tokens)
    total = 0.0
    for token, entries, raw in zip(truth.tokens, found.logprobs, truth.raw, strict=True):
        check_entries(entries, token, raw, params.logprobs)
        total += raw[token]
    assert found.cumulative_logprob == pytest.approx(total, abs=1e-4)


def check_entries(entries: TokenLogprobs, token: int, raw: Floats, num_top: int) -> None:
    order = sorted(range(len(raw)), key=lambda other: (-raw[other], other))
    wanted = dict.fromkeys([token, *order[:num_top]])
    assert list(entries) == list(wanted)
    for other, entry in entries.items():
        rank = order.index(other) + 1
        assert entry.rank == (rank if rank <= 20 else None)
        assert entry.logprob == pytest.approx(raw[other], abs=1e-5)


def run(setup: Setup, kind: str, requests: Sequence[tuple[list[int], SamplingParams]]) -> None:
    """Decode together with drafts of one kind; everything must be what the oracle says."""
    truths = [setup.oracle.truth(prompt, params) for prompt, params in requests]
    setup.planter.kind = kind
    for (prompt, params), truth in zip(requests, truths, strict=True):
        assert params.seed is not None
        setup.planter.texts[params.seed] = [*prompt, *truth.tokens]
    speculation: Any = "off" if kind == "none" else "auto"
    outputs = setup.llm.generate(
        [prompt for prompt, _ in requests],
        [replace(params, speculation=speculation) for _, params in requests],
    )
    for output, truth, (_, params) in zip(outputs, truths, requests, strict=True):
        check(output.outputs[0], truth, params)
        if kind == "none":
            assert output.num_verified == 0
        elif kind == "right":
            assert output.num_accepted == output.num_verified
        elif kind == "wrong":
            assert output.num_accepted == 0
    if kind != "none" and max(len(truth.tokens) for truth in truths) > 3:
        assert sum(output.num_verified for output in outputs) > 0, "no draft was offered"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", CASES)
def test_the_parameter_changes_the_text(setup: Setup, name: str, temperature: float) -> None:
    """Otherwise the tests below would pass with the parameter ignored."""
    params = params_of(name, temperature)
    neutral = replace(PLAIN, temperature=temperature, seed=params.seed)
    is_plain = name in ("plain", "logprobs", "own logprob only")
    if temperature == 0 and name in GREEDY_IS_PLAIN:
        is_plain = True
    want, plain = setup.oracle.truth(PROMPT, params), setup.oracle.truth(PROMPT, neutral)
    assert (want.tokens == plain.tokens) is is_plain
    if name == "repetition":
        blind = setup.oracle.truth(PROMPT, params, reads_prompt=False)
        assert want.tokens != blind.tokens
    if "min_tokens" in CASES[name]:
        early = setup.oracle.truth(PROMPT, replace(params, min_tokens=0))
        assert early.reason == "stop" and len(early.tokens) < params.min_tokens
        assert len(want.tokens) >= params.min_tokens


@pytest.mark.parametrize("kind", ("none", "right", "wrong", "random"))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_alone(setup: Setup, kind: str, temperature: float) -> None:
    for name in CASES:
        run(setup, kind, [(PROMPT, params_of(name, temperature))])


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_mixed_batch(setup: Setup, kind: str) -> None:
    """All cases at both temperatures, in an order that puts rich and plain rows side by side, with
    prompts of different lengths; more requests than slots."""
    requests = [
        (PROMPT[: 1 + index % 5], params_of(name, temperature))
        for index, name in enumerate(CASES)
        for temperature in (0.0, 0.7)
    ]
    random.Random(len(kind)).shuffle(requests)
    run(setup, kind, requests)


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_with_a_step_in_flight(
    setup: Setup, model: Any, tokenizer: Tokenizer, verify: VerifyMode
) -> None:
    """The host one step behind; greedy requests of rejection sampling are those of the oracle."""
    other = build(model, tokenizer, verify, async_scheduling=True)
    other = replace(other, oracle=setup.oracle)
    temperatures = (0.0, 0.7) if verify == "coupled" else (0.0,)
    requests = [
        (PROMPT[: 1 + index % 5], params_of(name, temperature))
        for index, name in enumerate(CASES)
        for temperature in temperatures
    ]
    run(other, "random" if verify == "coupled" else "own", requests)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_do_not_depend_on_drafts(setup: Setup, kind: str) -> None:
    """Those of drafts of any kind equal those without drafts, text included."""
    params = replace(params_of("everything", 0.7), logprobs=20)
    truth = setup.oracle.truth(PROMPT, params)
    setup.planter.texts[params.seed or 0] = [*PROMPT, *truth.tokens]
    setup.planter.kind = "none"
    (plain,) = setup.llm.generate([PROMPT], replace(params, speculation="off"))
    setup.planter.kind = kind
    (found,) = setup.llm.generate([PROMPT], params)
    want, got = plain.outputs[0].logprobs, found.outputs[0].logprobs
    assert want is not None and got is not None and len(want) == len(got)
    for left, right in zip(want, got, strict=True):
        assert list(left) == list(right)
        for token, entry in left.items():
            assert right[token] == replace(entry, logprob=right[token].logprob)
            assert right[token].logprob == pytest.approx(entry.logprob, abs=1e-6)


@pytest.mark.parametrize("length", [1, 2, 5, 6, 13])
def test_prompt_logprobs(setup: Setup, length: int) -> None:
    """Prompts of one chunk, of several, and of one token, beside requests that ask for none."""
    prompt = [(7 * place * place + 31) % 266 for place in range(length)]
    params = replace(PLAIN, prompt_logprobs=3, max_tokens=2)
    setup.planter.kind = "own"
    outputs = setup.llm.generate([prompt, PROMPT, prompt], [params, PLAIN, replace(params, n=2)])
    assert outputs[1].prompt_logprobs is None
    for output in (outputs[0], outputs[2]):
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == length
        assert output.prompt_logprobs[0] is None
        for place in range(1, length):
            raw = log_softmax(setup.oracle.logits(prompt[:place]))
            entries = output.prompt_logprobs[place]
            assert entries is not None
            check_entries(entries, prompt[place], raw, 3)
