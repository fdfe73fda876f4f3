"""`decodegrid batch`: answers in order, errors in their place, and the file that is written."""

import fcntl
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decodegrid.engine import batch_file
from decodegrid.engine.cli import main
from decodegrid.engine.llm import LLM
from decodegrid.engine.tokenizer import ChatMessage, Tokenizer
from decodegrid.engine.vllm_fields import SAMPLING_VALUES

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def llm(tokenizer: Tokenizer, make_runner: Callable[..., Any]) -> LLM:
    return LLM.from_runner(make_runner(max_model_len=400, drafts="mixed"), tokenizer)


@pytest.fixture
def call(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """call(*lines, flags=()): exit status, answers and standard error."""

    def run(*lines: str, flags: tuple[str, ...] = ()) -> tuple[int, list[Any], str]:
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("\n".join(lines), encoding="utf-8")
        status = main(["batch", str(source), str(output), *flags], lambda loaded: llm)
        answers = [json.loads(line) for line in output.read_text().splitlines()]
        return status, answers, capsys.readouterr().err

    return run


def line(custom_id: str, url: str = COMPLETIONS, /, **body: Any) -> str:
    fields = {"temperature": 0, "max_tokens": 5, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": fields})


def test_answers_stand_in_the_order_of_the_lines(
    call: Any, llm: LLM, tokenizer: Tokenizer, toy: Any
) -> None:
    """The first line takes longest, so the others end before it."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    turns = [ChatMessage("system", "s"), ChatMessage("user", "hi")]
    status, answers, err = call(
        line("long", model="m", prompt=[20, 21], max_tokens=60),
        "",
        line("text", prompt="hello", stream=False, user="u", stop=None),
        line("chat", CHAT, messages=messages, max_tokens=None, max_completion_tokens=7),
        line("parts", CHAT, messages=[messages[0], {"role": "user", "content": parts}]),
        line("two", prompt="x", n=2, temperature=1, seed=3),
    )
    assert status == 0 and "decode steps" in err
    assert [answer["custom_id"] for answer in answers] == ["long", "text", "chat", "parts", "two"]
    prompts = [
        ([20, 21], 60),
        (tokenizer.encode("hello"), 5),
        (tokenizer.encode_chat(turns), 7),
        (tokenizer.encode_chat(turns), 5),
    ]
    for answer, (prompt, count) in zip(answers, prompts, strict=False):
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        body = answer["response"]["body"]
        (choice,) = body["choices"]
        text = tokenizer.decode(toy.generate(prompt, count))
        found = choice["text"] if "text" in choice else choice["message"]["content"]
        assert found == text and choice["finish_reason"] == "length" and choice["index"] == 0
        assert body["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "total_tokens": len(prompt) + count,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
    objects = [answer["response"]["body"]["object"] for answer in answers]
    assert objects == ["text_completion"] * 2 + ["chat.completion"] * 2 + ["text_completion"]
    assert answers[2]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert answers[0]["response"]["body"]["model"] == "m"
    assert len({answer["id"] for answer in answers}) == 5
    two = answers[4]["response"]["body"]
    want = toy.generate(tokenizer.encode("x"), 5, 1.0, 3)
    assert two["choices"][0]["text"] == tokenizer.decode(want)
    assert two["choices"][1]["text"] != two["choices"][0]["text"]
    assert two["usage"]["completion_tokens"] == 10
    assert not llm.scheduler.has_unfinished


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"prompt": "x", "nonsense": 1}, "nonsense is not supported", "nonsense"),
        ({"prompt": "x", "messages": []}, "messages is not supported", "messages"),
        ({"prompt": "x", "logprobs": 21}, "logprobs must be 0 to 20, got 21", "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs must be an integer", "logprobs"),
        ({"prompt": "x", "top_logprobs": 1}, "a field of chats", "top_logprobs"),
        (
            {"prompt": "x", "echo": True},
            "echo is not supported, got True; it can only be False",
            "echo",
        ),
        (
            {"prompt": "x", "stream": True},
            "stream is not supported, got True; it can only be False",
            "stream",
        ),
        (
            {"prompt": "x", "best_of": True},
            "best_of is not supported, got True; it can only be 1",
            "best_of",
        ),
        (
            {"prompt": "x", "detokenize": False},
            "detokenize is not supported, got False; it can only be True",
            "detokenize",
        ),
        (
            {"prompt": "x", "bad_words": ["y"]},
            "bad_words is not supported, got ['y']; it can only be []",
            "bad_words",
        ),
        ({"prompt": "x", "min_p": 1.1}, "min_p must be 0 to 1, got 1.1", "min_p"),
        ({"prompt": "x", "logit_bias": {"5": 101}}, "[5] must be -100 to 100", "logit_bias"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "as its keys, got 'a'", "logit_bias"),
        ({"prompt": "x", "logit_bias": {"05": 1}}, "as its keys, got '05'", "logit_bias"),
        ({"prompt": "x", "logit_bias": {"9" * 99: 1}}, "as its keys, got '999", "logit_bias"),
        ({"prompt": "x", "logit_bias": [1]}, "must be a mapping", "logit_bias"),
        ({"prompt": "x", "logit_bias": {"999": 1}}, "logit_bias key 0 is 999", None),
        ({"prompt": "x", "frequency_penalty": 2.1}, "must be -2 to 2", "frequency_penalty"),
        ({"prompt": "x", "min_tokens": 6}, "at most max_tokens (5), got 6", "min_tokens"),
        ({"prompt": "x", "prompt_logprobs": -1}, "must be 0 to 20", "prompt_logprobs"),
        ({"prompt": "x", "temperature": "1"}, "temperature must be a finite", "temperature"),
        ({"prompt": "x", "stop_token_ids": [-1]}, r"stop_token_ids[0]", "stop_token_ids"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1", "max_tokens"),
        ({"prompt": "x", "model": 3}, "model must be a string", "model"),
        ({"prompt": "x", "n": 0}, "n must be 1 to 128", "n"),
        ({"prompt": "x", "speculation": 9}, "speculation is 9 drafts", None),
        ({"prompt": ["x", "y"]}, "one prompt a request", "prompt"),
        ({"prompt": ""}, "the prompt is empty", "prompt"),
        ({"prompt": "x", "guided_json": {}}, "structured_outputs does that", "guided_json"),
        ({"prompt": "x", "ebnf": "root ::= x"}, "structured_outputs does that", "ebnf"),
        ({"prompt": "\ud800"}, "not valid Unicode", None),
        ({"prompt": "y" * 400}, "401 tokens; the context of 400 tokens", None),
        ({}, "prompt must be", "prompt"),
    ],
)
def test_a_bad_body_is_refused_and_the_others_go_on(
    call: Any, body: dict[str, Any], message: str, param: str | None
) -> None:
    status, answers, _ = call(line("a", prompt="x"), line("bad", **body), line("b", prompt="y"))
    assert status == 0
    assert [answer["response"]["status_code"] for answer in answers] == [200, 400, 200]
    assert answers[1]["custom_id"] == "bad" and answers[1]["error"] is None
    error = answers[1]["response"]["body"]["error"]
    assert message in error["message"] and error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_fields_of_vllm_that_ask_for_nothing_are_let_through(call: Any) -> None:
    fields = {name: values[0] for name, values in SAMPLING_VALUES.items()}
    _, answers, _ = call(line("plain", prompt="x"), line("same", prompt="x", **fields))
    texts = [answer["response"]["body"]["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"logprobs": 3}, "logprobs must be true or false in a chat", "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs is 2, but logprobs is not true", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "must be 0 to 20, got 21", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "must be an integer", "top_logprobs"),
    ],
)
def test_logprobs_of_a_chat_are_refused_in_their_own_words(
    call: Any, fields: dict[str, Any], message: str, param: str
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    _, (answer,), _ = call(line("bad", CHAT, messages=messages, **fields))
    error = answer["response"]["body"]["error"]
    assert message in error["message"] and error["param"] == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "name": "n"}], "messages[0].name"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "messages"),
    ],
)
def test_bad_messages(call: Any, messages: Any, param: str) -> None:
    _, (answer,), _ = call(line("bad", CHAT, messages=messages))
    assert answer["response"]["status_code"] == 400
    assert answer["response"]["body"]["error"]["param"] == param


def test_lines_that_are_no_request(call: Any) -> None:
    ok = json.loads(line("x", prompt="x"))
    _, answers, err = call(
        '{"custom_id": "half \\u00e4", "method": "PO',
        '{"custom_id": "nan", "a": NaN}',
        "[" * 100_000,
        "[1]",
        json.dumps({**ok, "custom_id": 5}),
        line("same", prompt="x"),
        line("same", prompt="x"),
        json.dumps({**ok, "custom_id": "get", "method": "GET"}),
        json.dumps({**ok, "custom_id": "url", "url": "/v1/embeddings"}),
        json.dumps({**ok, "custom_id": "more", "more": 1}),
        json.dumps({**ok, "custom_id": "list", "body": []}),
        flags=("--no-report",),
    )
    wants = ["not JSON at line 1", "NaN is no JSON number", "not readable as JSON"]
    wants += ["not an object", "custom_id must be a string", "", "'same' was used before"]
    for number, (answer, want) in enumerate(zip(answers, wants, strict=False), start=1):
        if want:
            assert answer["response"] is None
            assert answer["error"]["message"].startswith(f"line {number}: ")
            assert want in answer["error"]["message"]
    # The answer goes to whoever can be read; two ids are nobody's.
    ids = ["half \u00e4", "nan", None, None, None, "same", "same", "get"]
    assert [answer["custom_id"] for answer in answers[:8]] == ids
    assert answers[5]["response"]["status_code"] == 200
    found = [answer["response"]["body"]["error"] for answer in answers[7:]]
    assert [error["param"] for error in found] == ["method", "url", "more", "body"]
    assert [answer["response"]["status_code"] for answer in answers[7:]] == [400] * 4
    assert err == ""


def test_what_is_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output, empty = (tmp_path / name for name in ("in", "out", "empty"))
    source.write_text(line("a", prompt="x"))
    empty.write_text("\n \n")
    output.write_text("precious")
    partial = tmp_path / "other.partial"
    partial.write_text("precious")

    def never(loaded: Any) -> LLM:
        raise AssertionError("the engine was started")

    for arguments, message in (
        ((source, output), f"{output} exists; --overwrite replaces it"),
        ((source, tmp_path / "other"), f"{partial} exists; --overwrite replaces it"),
        ((source, source, "--overwrite"), f"{source} is the input itself"),
        ((partial, tmp_path / "other", "--overwrite"), f"{partial} is the input itself"),
        ((source, tmp_path / "new", "--trace", tmp_path / "new"), "--trace and OUTPUT are both"),
        (
            (source, tmp_path / "new", "--trace", tmp_path / "new.partial"),
            "--trace and OUTPUT.partial are both",
        ),
        ((empty, tmp_path / "new", "--trace", empty), "--trace and INPUT are both"),
        ((source, "/proc/new"), "OUTPUT is /proc/new; /proc cannot be written to"),
        ((source, tmp_path, "--overwrite"), f"{tmp_path} is a directory"),
        ((source, tmp_path / "no" / "out"), "no such directory"),
        ((empty, tmp_path / "new"), f"{empty}: no request in it"),
        ((tmp_path / "absent", tmp_path / "new"), "absent: No such file"),
        ((source, tmp_path / "new", "--config", "/nowhere/a.yaml"), "/nowhere/a.yaml"),
    ):
        assert main(["batch", *map(str, arguments)], never) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    assert output.read_text() == partial.read_text() == "precious"


def test_overwrite_and_a_run_that_is_cut_off(
    call: Any, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered stands in OUTPUT.partial, and an old OUTPUT as it was."""
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    output.write_text("{}\n")
    lines = [line("short", prompt="x", max_tokens=1), line("long", prompt=[20], max_tokens=300)]
    with monkeypatch.context() as patch:
        answer_body, calls = batch_file.answer_body, []

        def fail(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 2:
                raise OSError("no space left")
            return answer_body(*args)

        patch.setattr(batch_file, "answer_body", fail)
        assert call(*lines, flags=("--overwrite",))[0] == 2
    assert output.read_text() == "{}\n"
    (answer,) = [json.loads(text) for text in partial.read_text().splitlines()]
    assert answer["custom_id"] == "short" and answer["response"]["status_code"] == 200
    assert not llm.scheduler.has_unfinished
    _, answers, _ = call(*lines, flags=("--overwrite",))
    assert [answer["custom_id"] for answer in answers] == ["short", "long"]
    assert not partial.exists()


def test_two_runs_never_write_one_output(
    call: Any, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever holds OUTPUT.partial goes on undisturbed; a run that was killed holds nothing."""
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    output.write_text("{}\n")
    one = [line("a", prompt="x")]
    held = partial.open("a")
    held.write("half of a li")
    held.flush()
    fcntl.flock(held, fcntl.LOCK_EX)
    status, answers, err = call(*one, flags=("--overwrite",))
    assert status == 2 and answers == [{}]
    assert f"{partial} is written by another run" in err and partial.read_text() == "half of a li"
    held.close()
    assert call(*one, flags=("--overwrite",))[1][0]["custom_id"] == "a"

    # Files that came to be during the start-up, after they were looked for.
    monkeypatch.setattr("decodegrid.engine.cli_batch.check_output", lambda *args, **named: None)
    for path in (output, partial):
        path.write_text('{"custom_id": "other"}\n')
        output.touch()
        status, _, err = call(*one)
        assert status == 2 and "exists; --overwrite replaces it" in err
        assert path.read_text() == '{"custom_id": "other"}\n'
    partial.unlink()
    output.unlink()
    assert call(*one)[0] == 0 and not partial.exists()


def test_a_full_disk_names_the_file(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    output.write_text("{}\n")
    hold = batch_file._hold

    def hold_full(*args: Any, **named: Any) -> io.FileIO:
        hold(*args, **named).close()
        return io.FileIO("/dev/full", "w")

    monkeypatch.setattr(batch_file, "_hold", hold_full)
    status, answers, err = call(line("a", prompt="x"), flags=("--overwrite", "--no-report"))
    assert status == 2 and answers == [{}]
    assert err == f"decodegrid: error: {partial}: No space left on device\n"


def test_open_sampling_is_the_deployments(call: Any, tokenizer: Tokenizer, toy: Any) -> None:
    body = {"prompt": "x", "temperature": None, "max_tokens": None}
    flags = ("--set", "sampling.temperature=0", "--set", "sampling.max_tokens=9")
    _, (answer,), _ = call(line("a", **body), flags=flags)
    want = tokenizer.decode(toy.generate(tokenizer.encode("x"), 9))
    assert answer["response"]["body"]["choices"][0]["text"] == want
