"""`decodegrid serve` through the official client: chats, completions, streams and refusals."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from decodegrid.engine.llm import LLM
from decodegrid.engine.tokenizer import ChatMessage, Tokenizer

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(serve_shared: Any, make_runner: Callable[..., Any], tokenizer: Tokenizer) -> Any:
    return serve_shared(
        lambda: LLM.from_runner(make_runner(max_model_len=400, drafts="mixed"), tokenizer),
        "scheduler.max_model_len=400",
        "scheduler.max_num_reqs=4",
    )


@pytest.fixture(scope="module")
def client(server: Any) -> openai.OpenAI:
    made: openai.OpenAI = server.client()
    return made


def prompt_of(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode_chat([ChatMessage("user", "hi")])


def test_a_chat_is_answered_whole(client: Any, tokenizer: Tokenizer, toy: Any) -> None:
    prompt = prompt_of(tokenizer)
    found = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=9
    )
    (choice,) = found.choices
    assert choice.message.content == tokenizer.decode(toy.generate(prompt, 9))
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert found.model == "tiny" and found.object == "chat.completion"
    assert found.usage.prompt_tokens == len(prompt) and found.usage.completion_tokens == 9


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_streamed_chat_has_one_finish_chunk_and_the_usage_last(
    server: Any, client: Any, tokenizer: Tokenizer, toy: Any, include_usage: bool
) -> None:
    prompt = prompt_of(tokenizer)
    options: Any = {"stream_options": {"include_usage": True}} if include_usage else {}
    fields: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    chunks = list(client.chat.completions.create(**fields, stream=True, **options))
    with_choice = [chunk for chunk in chunks if chunk.choices]
    assert with_choice[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in with_choice)
    assert text == tokenizer.decode(toy.generate(prompt, 12))
    reasons = [chunk.choices[0].finish_reason for chunk in with_choice]
    assert reasons[-1] == "length" and reasons[:-1] == [None] * (len(reasons) - 1)
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in with_choice)
    assert (chunks[-1].choices == []) is include_usage
    if include_usage:
        assert chunks[-1].usage.total_tokens == len(prompt) + 12
    raw = server.post("/v1/chat/completions", {**fields, "stream": True, **options})
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.text.endswith("data: [DONE]\n\n") and raw.text.count("[DONE]") == 1


def test_several_streamed_completions_have_a_finish_each(client: Any, tokenizer: Tokenizer) -> None:
    fields: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 7, "seed": 3, "n": 3}
    whole = client.chat.completions.create(**fields)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(texts.values())) == 3
    streamed, reasons = dict.fromkeys(range(3), ""), []
    for chunk in client.chat.completions.create(**fields, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        reasons += [choice.index] if choice.finish_reason else []
    assert streamed == texts and sorted(reasons) == [0, 1, 2]


def test_a_completion_takes_text_and_ids(client: Any, tokenizer: Tokenizer, toy: Any) -> None:
    want = tokenizer.decode(toy.generate(tokenizer.encode("abc"), 6))
    for prompt in ("abc", tokenizer.encode("abc")):
        fields: Any = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 6}
        assert client.completions.create(**fields).choices[0].text == want
        chunks = list(client.completions.create(**fields, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == want
        assert [chunk.choices[0].finish_reason for chunk in chunks].count("length") == 1


def test_logprobs_of_a_stream_are_those_of_the_whole(client: Any, tokenizer: Tokenizer) -> None:
    """Case C6 among them: no top ones, with drafts."""
    fields: Any = {"model": "tiny", "temperature": 0, "max_tokens": 10}
    chat: Any = {**fields, "messages": MESSAGES, "logprobs": True}
    for num_top in (0, 2):
        whole = client.chat.completions.create(**chat, top_logprobs=num_top).choices[0].logprobs
        assert len(whole.content) == 10
        assert all(len(item.top_logprobs) == num_top for item in whole.content)
        chunks = client.chat.completions.create(**chat, top_logprobs=num_top, stream=True)
        found = [chunk.choices[0].logprobs for chunk in chunks]
        assert [item for part in found if part for item in part.content] == whole.content
    text: Any = {**fields, "prompt": "abc", "logprobs": 1}
    whole = client.completions.create(**text).choices[0].logprobs
    parts = [c.choices[0].logprobs for c in client.completions.create(**text, stream=True)]
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [item for part in parts if part for item in getattr(part, name)]
        assert joined == getattr(whole, name) and len(joined) == 10


def test_a_stop_string_ends_the_text_before_it(client: Any, tokenizer: Tokenizer, toy: Any) -> None:
    """The string ends inside what one step accepts; ids and usage end with it."""
    prompt = tokenizer.encode("abc")
    ids = toy.generate(prompt, 40)
    text = tokenizer.decode(ids)
    place = next(i for i in range(5, 30) if "\ufffd" not in text[i : i + 2])
    stop = text[place : place + 2]
    start = text.index(stop)
    count = next(n for n in range(1, 41) if stop in tokenizer.decode(ids[:n]))
    fields: Any = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 40}
    found = client.completions.create(**fields, stop=stop)
    assert found.choices[0].text == text[:start] and found.choices[0].finish_reason == "stop"
    assert found.usage.completion_tokens == count
    chunks = list(client.completions.create(**fields, stop=[stop], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[:start]


def test_sampling_fields_are_honoured(client: Any, tokenizer: Tokenizer, toy: Any) -> None:
    prompt = tokenizer.encode("abc")
    fields: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 8}
    found = client.completions.create(**fields, temperature=0.5, seed=7)
    want = toy.generate(prompt, 8, 0.5, 7)
    assert found.choices[0].text == tokenizer.decode(want)
    # The toy does not bias; that these reach a request at all shows in what is refused.
    for extra, words in (
        ({"logit_bias": {"9": 101}}, "logit_bias"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
    ):
        with pytest.raises(openai.BadRequestError) as refusal:
            client.completions.create(**fields, **extra)
        assert refusal.value.param == words


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("chat/completions", {"messages": MESSAGES, "nonsense": 1}, 400, "nonsense", "nonsense"),
        ("chat/completions", {"messages": MESSAGES, "functions": []}, 400, "functions", "functio"),
        ("chat/completions", {"messages": []}, 400, "messages", "not empty"),
        ("chat/completions", {"messages": MESSAGES, "n": 0}, 400, "n", "1 to 128"),
        ("chat/completions", {"messages": MESSAGES, "stream": 1}, 400, "stream", "true or false"),
        (
            "chat/completions",
            {"messages": MESSAGES, "stream_options": {"include_usage": True}},
            400,
            "stream_options",
            "stream is not true",
        ),
        (
            "chat/completions",
            {"messages": MESSAGES, "stream": True, "stream_options": {"x": 1}},
            400,
            "stream_options",
            "x is not supported",
        ),
        ("chat/completions", {"messages": MESSAGES, "model": "gpt"}, 404, "model", "'gpt'"),
        ("completions", {"prompt": ""}, 400, "prompt", "empty"),
        ("completions", {"prompt": ["a", 5]}, 400, "prompt", "or a list of either"),
        ("completions", {"prompt": "a", "echo": True}, 400, "echo", "echo"),
        ("completions", {"prompt": [999]}, 400, "prompt", "prompt token id 0 is 999"),
        ("completions", {"prompt": "\ud800"}, 400, "prompt", "not valid Unicode"),
        ("completions", {"prompt": "a", "speculation": 9}, 400, "speculation", "9 drafts"),
        ("completions", {"prompt": "a", "logit_bias": {"999": 1}}, 400, "logit_bias", "999"),
        ("completions", {"prompt": "a", "stop_token_ids": [999]}, 400, "stop_token_ids", "999"),
        ("completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature", "number"),
        (
            "completions",
            {"prompt": "a", "stream": True, "prompt_logprobs": 1},
            400,
            "prompt_logprobs",
            "in a stream",
        ),
        ("completions", b'{"prompt": "a", "prompt": "b"}', 400, None, "there twice"),
        ("completions", b'{"prompt": NaN}', 400, None, "NaN"),
        ("completions", b"[" * 100000, 400, None, "nested too deeply"),
        ("completions", b"\xff", 400, None, "not UTF-8 at byte 0"),
        ("completions", b"5", 400, "body", "a number"),
        ("completions", b"", 400, None, "not JSON"),
    ],
)
def test_refusals_name_the_field(
    server: Any, path: str, body: Any, status: int, param: str | None, words: str
) -> None:
    answer = server.post(f"/v1/{path}", body)
    error = answer.json()["error"]
    assert answer.status_code == status and error["param"] == param, error
    assert words in error["message"] and error["type"] == "invalid_request_error"
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_the_context_is_held_to(server: Any, client: Any) -> None:
    """A prompt of the limit's length less one is served, and one token of it; no more fits."""

    def create(num_prompt: int, **fields: Any) -> Any:
        ids = [20] * num_prompt
        return client.completions.create(model="tiny", prompt=ids, temperature=0, **fields)

    assert create(399, max_tokens=1).usage.completion_tokens == 1
    assert create(390).usage.completion_tokens == 10
    # Where the prompt would fit alone, what is asked for behind it is to blame.
    for num_prompt, fields, param, numbers in (
        (400, {}, "prompt", ("400",)),
        (401, {}, "prompt", ("400", "401")),
        (401, {"max_tokens": 2}, "prompt", ("400", "401")),
        (399, {"max_tokens": 2}, "max_tokens", ("400", "401", "399")),
        (1, {"max_tokens": 10**4299}, "max_tokens", ("400",)),
        (1, {"max_tokens": 10**4300 - 1}, "max_tokens", ("400", "too long to print")),
    ):
        with pytest.raises(openai.BadRequestError) as refusal:
            create(num_prompt, **fields)
        assert refusal.value.code == "context_length_exceeded" and refusal.value.param == param
        assert all(number in str(refusal.value) for number in numbers)
    assert create(5, max_tokens=3).usage.completion_tokens == 3


def test_models_tokens_and_version(server: Any, client: Any, tokenizer: Tokenizer) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.models.retrieve("gpt")
    found = server.post("/tokenize", {"prompt": "a<|x|>"}).json()
    assert found["tokens"] == tokenizer.encode("a<|x|>") and found["max_model_len"] == 400
    assert found["count"] == len(found["tokens"])
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert chat == prompt_of(tokenizer)
    text = server.post("/detokenize", {"tokens": chat}).json()["prompt"]
    assert text == tokenizer.decode(chat, skip_special_tokens=False)
    for path, body, param in (
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [1, 266]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        answer = server.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert json.loads(server.get("/version")[1])["version"]
    assert server.get("/nothing")[0] == 404 and "no such path" in server.get("/nothing")[1]
    assert server.get("/v1/completions")[0] == 405
