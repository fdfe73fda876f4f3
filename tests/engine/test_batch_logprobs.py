"""Logprobs and the other parameters of a body: what becomes of them, and how they are answered."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decodegrid.configs.load import load_config
from decodegrid.engine.batch_body import read_body
from decodegrid.engine.batch_logprobs import MIN_LOGPROB, chat_logprobs, completion_logprobs
from decodegrid.engine.cli import main
from decodegrid.engine.llm import LLM
from decodegrid.engine.logprobs import Logprob
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
EURO = "\u20ac".encode()


@pytest.fixture
def answer(
    tokenizer: Tokenizer,
    make_runner: Callable[..., Any],
    scripted: Any,
    byte_id: Callable[[int], int],
    tmp_path: Path,
) -> Callable[..., Any]:
    """answer(kind, text, **body): the body that answers one request, whose output is `text`."""

    def run(kind: str, data: bytes, **body: Any) -> Any:
        prompt = tokenizer.encode("p") if kind == "completions" else None
        length = len(prompt) if prompt else len(_chat_ids(tokenizer))
        model = scripted(length, [*map(byte_id, data), 1])
        llm = LLM.from_runner(make_runner(model=model, max_model_len=400), tokenizer)
        fields = {"temperature": 0, "max_tokens": 20, **body}
        fields["prompt" if prompt else "messages"] = "p" if prompt else MESSAGES
        url = "/v1/completions" if prompt else "/v1/chat/completions"
        item = {"custom_id": "a", "method": "POST", "url": url, "body": fields}
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text(json.dumps(item))
        assert main(["batch", str(source), str(output), "--overwrite"], lambda loaded: llm) == 0
        response = json.loads(output.read_text())["response"]
        assert response["status_code"] == 200, response
        return response["body"]

    return run


def _chat_ids(tokenizer: Tokenizer) -> list[int]:
    request = read_body(
        "chat", {"messages": MESSAGES}, tokenizer, load_config(None).config.sampling
    )
    assert isinstance(request.prompt, list)
    return request.prompt


def fake_logprob(token_id: int, place: int = 0) -> float:
    """What the fake device says of an emitted token (place 0) and of the ids behind it."""
    return -1.0 - token_id % 7 - place


def test_a_completion_has_four_lists(
    answer: Any, tokenizer: Tokenizer, byte_id: Callable[[int], int]
) -> None:
    """Offsets are those of the text; a part of a character is spelled as bytes, a special token by
    its name; each token stands among its own top ones."""
    body = answer("completions", b"a" + EURO + b"b", logprobs=2)
    (choice,) = body["choices"]
    ids = [*map(byte_id, b"a" + EURO + b"b"), 1]
    found = choice["logprobs"]
    eos = tokenizer.decode([1], skip_special_tokens=False)
    assert choice["text"] == "a\u20acb"
    assert found["tokens"] == ["a", r"bytes:\xe2", r"bytes:\x82", "\u20ac", "b", eos]
    assert found["text_offset"] == [0, 1, 1, 1, 2, 3]
    assert found["token_logprobs"] == [fake_logprob(token_id) for token_id in ids]
    assert found["top_logprobs"][0] == {"a": fake_logprob(ids[0]), "b": fake_logprob(ids[0], 1)}
    assert all(
        token in top for token, top in zip(found["tokens"], found["top_logprobs"], strict=True)
    )
    assert "prompt_logprobs" not in choice and "prompt_logprobs" not in body
    (only,) = answer("completions", b"ab", logprobs=0)["choices"]
    assert [list(top) for top in only["logprobs"]["top_logprobs"]] == [["a"], ["b"], [eos]]
    for asks in ({"logprobs": None}, {"logprobs": False}, {}):
        assert answer("completions", b"a", **asks)["choices"][0]["logprobs"] is None


def test_a_chat_has_a_list_of_tokens(answer: Any, byte_id: Callable[[int], int]) -> None:
    """Their bytes make up the text; top_logprobs 0 gives empty lists."""
    data = b"a" + EURO
    body = answer("chat", data, logprobs=True, top_logprobs=2)
    (choice,) = body["choices"]
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == data.decode()
    assert bytes(byte for item in content[:-1] for byte in item["bytes"]) == data
    assert content[0]["token"] == "a" and content[0]["bytes"] == [97]
    first = byte_id(ord("a"))
    assert content[0]["top_logprobs"] == [
        {"token": "a", "logprob": fake_logprob(first), "bytes": [97]},
        {"token": "b", "logprob": fake_logprob(first, 1), "bytes": [98]},
    ]
    (choice,) = answer("chat", data, logprobs=True)["choices"]
    assert [item["top_logprobs"] for item in choice["logprobs"]["content"]] == [[]] * 5
    (choice,) = answer("chat", data, logprobs=False, top_logprobs=0)["choices"]
    assert choice["logprobs"] is None


def test_prompt_logprobs_stand_where_the_server_of_vllm_has_them(answer: Any) -> None:
    body = answer("completions", b"a", prompt_logprobs=0, n=2)
    for choice in body["choices"]:
        first, second = choice["prompt_logprobs"]
        assert first is None
        ((token_id, entry),) = second.items()
        logprob = fake_logprob(int(token_id))
        assert entry == {"logprob": logprob, "rank": 1, "decoded_token": "p"}
    assert "prompt_logprobs" not in body
    body = answer("chat", b"a", prompt_logprobs=1)
    assert body["prompt_logprobs"][0] is None and len(body["prompt_logprobs"]) > 2
    assert "prompt_logprobs" not in body["choices"][0]


def test_forms_of_single_tokens(tokenizer: Tokenizer, byte_id: Callable[[int], int]) -> None:
    """JSON has no infinity; of tokens with one text the likelier counts; a token beyond the top
    ones is no top one."""
    a, b = byte_id(ord("a")), byte_id(ord("b"))
    entries = {
        b: Logprob(float("-inf"), None, "b"),
        a: Logprob(-0.5, 1, "a"),
        3: Logprob(-1.0, 2, ""),
        4: Logprob(-2.0, 3, "a"),
    }
    found = completion_logprobs([entries], tokenizer)
    special = tokenizer.decode([3], skip_special_tokens=False)
    assert found["token_logprobs"] == [MIN_LOGPROB]
    assert found["top_logprobs"] == [{"b": MIN_LOGPROB, "a": -0.5, special: -1.0}]
    (item,) = chat_logprobs([entries], 2, tokenizer)["content"]
    assert item["token"] == "b" and item["logprob"] == MIN_LOGPROB
    assert [top["token"] for top in item["top_logprobs"]] == ["a", special]
    json.dumps([found, item], allow_nan=False)


def test_fields_become_parameters(tokenizer: Tokenizer) -> None:
    fields: dict[str, Any] = {
        "min_p": 0.1,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "min_tokens": 3,
        "n": 2,
        "top_k": 5,
        "stop": ["x"],
        "stop_token_ids": [7],
        "prompt_logprobs": 2,
    }
    body = {"prompt": "p", "temperature": 0.5, "max_tokens": 9, "logprobs": 3, **fields}
    body["logit_bias"] = {"5": -100, "60": 1.5}
    request = read_body("completion", body, tokenizer, load_config(None).config.sampling)
    assert request.params == SamplingParams(
        temperature=0.5,
        max_tokens=9,
        logprobs=3,
        top_p=load_config(None).config.sampling.top_p,
        logit_bias={5: -100, 60: 1.5},
        **fields,
    )
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 4}
    request = read_body("chat", body, tokenizer, load_config(None).config.sampling)
    assert request.params.logprobs == 4
