"""`decodegrid serve`: completions of several prompts in one request."""

import json
from typing import Any

import openai
import pytest

from decodegrid.engine.tokenizer import Tokenizer

GREEDY: Any = {"model": "tiny", "temperature": 0, "max_tokens": 7}
PROMPTS = ["abc", "x", "some longer text"]


def test_each_prompt_has_the_answer_that_it_has_alone(
    start: Any, tokenizer: Tokenizer, toy: Any, idle: Any
) -> None:
    server, llm, _ = start(max_num_reqs=2)
    client = server.client()
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    want = [tokenizer.decode(toy.generate(prompt, 7)) for prompt in ids]
    for prompts in (PROMPTS, ids):
        found = client.completions.create(**GREEDY, prompt=prompts)
        assert [choice.text for choice in found.choices] == want
        assert [choice.index for choice in found.choices] == [0, 1, 2]
        assert found.usage.prompt_tokens == sum(map(len, ids))
        assert found.usage.completion_tokens == 21 and found.usage.total_tokens == 21 + sum(
            map(len, ids)
        )
    server.wait_until(lambda: idle(llm) and not server.state.queue.open_ids)
    assert server.metric("vllm:request_success_total", finished_reason="length") == 6


def test_choices_count_through_the_prompts(start: Any) -> None:
    """n of the first prompt, then n of the second; each as it is alone."""
    server, _, _ = start()
    client = server.client()
    fields: Any = {"model": "tiny", "max_tokens": 5, "seed": 3, "n": 2, "logprobs": 0}
    alone = [
        (choice.text, choice.logprobs)
        for prompt in PROMPTS[:2]
        for choice in client.completions.create(**fields, prompt=prompt).choices
    ]
    found = client.completions.create(**fields, prompt=PROMPTS[:2]).choices
    assert [(choice.text, choice.logprobs) for choice in found] == alone
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.completions.create(**fields, prompt=PROMPTS[:2], **options)
    texts = dict.fromkeys(range(4), "")
    reasons = []
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons += [choice.index] if choice.finish_reason else []
    assert list(texts.values()) == [text for text, _ in alone] and sorted(reasons) == [0, 1, 2, 3]
    assert last.choices == [] and last.usage.completion_tokens == 20


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_them_all(start: Any, stream: bool, hold: Any, idle: Any) -> None:
    server, llm, runner = start(max_num_reqs=2)
    gate = hold(runner, "launch")
    connection = server.send({"prompt": PROMPTS, "max_tokens": 300, "stream": stream})
    server.wait_until(lambda: gate.num_waiting == 1)
    assert server.state.queue.num_open == 3
    connection.close()
    server.wait_until(lambda: not server.state.queue.open_ids)
    gate.open()
    server.wait_until(lambda: idle(llm))
    assert server.state.queue.num_open == 0 == server.state.queue.num_waiting_tokens


def test_a_server_that_ends_ends_them_all(start: Any, hold: Any) -> None:
    server, _, runner = start("server.drain_timeout_s=0.2")
    gate = hold(runner, "launch")
    connection = server.send({"prompt": PROMPTS, "max_tokens": 300})
    server.wait_until(lambda: gate.num_waiting == 1)
    server.server.stop()
    server.wait_until(lambda: "draining" in str(server.state.health.problem()))
    gate.open()
    error = json.loads(server.read_answer(connection)) if connection else {}
    assert "error" in error or len(error["choices"]) == 3


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ["a", ""]}, "prompt", "empty"),
        ({"prompt": [[20], []]}, "prompt", "list of either"),
        ({"prompt": [[20], [999]]}, "prompt", "999"),
        ({"prompt": ["a", [20] * 400]}, "prompt", "400"),
        ({"prompt": ["a"] * 5}, "prompt", "number of prompts must be at most 4"),
        ({"prompt": ["a"] * 2, "n": 3}, "prompt", "got 6"),
    ],
)
def test_refusals(start: Any, fields: Any, param: str, words: str, idle: Any) -> None:
    server, llm, _ = start("server.max_queued_requests=2", max_num_reqs=2)
    with pytest.raises(openai.BadRequestError) as refusal:
        server.client().completions.create(**{**GREEDY, **fields})
    assert refusal.value.param == param and words in str(refusal.value)
    assert server.state.queue.num_open == 0 and idle(llm)
