"""`decodegrid serve` with a real model whose regions are not compiled: what the library gives."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer

VOCAB_SIZE = 272


@pytest.fixture(scope="module")
def make_llm(
    make_model: Callable[..., Any],
    make_eager_runner: Callable[..., Any],
    tokenizer: Tokenizer,
    layer_changes: Any,
) -> Callable[[], LLM]:
    model = make_model(vocab_size=VOCAB_SIZE, **layer_changes[2])
    return lambda: LLM.from_runner(make_eager_runner(model, rich=True), tokenizer)


def test_the_server_emits_what_the_library_does(
    serve: Any, make_llm: Callable[[], LLM], tokenizer: Tokenizer
) -> None:
    """Greedy, sampled, penalised and biased, with drafts, all at once."""
    cases: list[dict[str, Any]] = [
        {"prompt": "ab", "temperature": 0.0},
        {"prompt": "some longer text", "temperature": 0.8, "seed": 5, "top_p": 0.9},
        {"prompt": "x", "temperature": 0.0, "frequency_penalty": 2.0, "min_p": 0.1},
        {"prompt": "ab", "temperature": 0.0, "logit_bias": {"40": 100.0}},
    ]
    prompts = [case["prompt"] for case in cases]
    params = []
    for case in cases:
        fields = {name: value for name, value in case.items() if name != "prompt"}
        if "logit_bias" in fields:
            fields["logit_bias"] = {40: 100.0}
        params.append(SamplingParams(max_tokens=8, logprobs=2, **fields))
    with make_llm() as llm:
        want = [output.outputs[0] for output in llm.generate(prompts, params)]
    server = serve(make_llm, "scheduler.max_model_len=64", "scheduler.max_num_reqs=3")
    bodies = [{"max_tokens": 8, "logprobs": 2, **case} for case in cases]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: server.post("/v1/completions", body).json(), bodies))
    for answer, completion in zip(answers, want, strict=True):
        (choice,) = answer["choices"]
        assert choice["text"] == completion.text
        assert choice["finish_reason"] == completion.finish_reason
        assert answer["usage"]["completion_tokens"] == len(completion.token_ids)
        chosen = [next(iter(entries.values())).logprob for entries in completion.logprobs or ()]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(chosen, abs=1e-9)
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 0
    assert server.metric("decodegrid_compilations_after_ready_total") == 0
    assert server.metric("decodegrid_captures_after_ready_total") == 0
    assert server.stop().status == 0
