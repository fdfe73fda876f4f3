"""`decodegrid serve`: API keys, sizes of bodies, request ids, logs and metrics."""

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from decodegrid.configs.load import ConfigError, load_config
from decodegrid.engine.llm import LLM
from decodegrid.engine.server_keys import read_keys
from decodegrid.engine.tokenizer import Tokenizer

KEYS = ("sk-first-0123456789", "sk-second-0123456789")


@pytest.fixture
def start(serve: Any, make_runner: Callable[..., Any], tokenizer: Tokenizer) -> Callable[..., Any]:
    def make(*overrides: str) -> Any:
        return serve(
            lambda: LLM.from_runner(make_runner(max_model_len=400, drafts="mixed"), tokenizer),
            "scheduler.max_model_len=400",
            "scheduler.max_num_reqs=4",
            *overrides,
        )

    return make


def test_keys_are_asked_for_and_not_told(
    start: Callable[..., Any], log: io.StringIO, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# of the team\n{KEYS[0]}\n\n  {KEYS[1]}\n")
    server = start(f"server.api_keys_file={path}")
    body: Any = {"model": "tiny", "prompt": "secret words", "max_tokens": 2}
    for key in KEYS:
        server.client(api_key=key).completions.create(**body)
        assert server.post("/v1/completions", body, **{"x-api-key": key}).status_code == 200
    for headers in (
        {},
        {"authorization": f"Bearer {KEYS[0]}x"},
        {"authorization": KEYS[0]},
        {"authorization": f"Basic {KEYS[0]}"},
        {"x-api-key": b"\xff"},
    ):
        answer = server.post("/v1/completions", body, **headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="wrong").models.list()
    for probe in ("/live", "/health", "/ready", "/metrics", "/version"):
        assert server.get(probe)[0] == 200
    assert server.get("/v1/models")[0] == 401 == server.get("/openapi.json")[0]
    server.stop()
    text = log.getvalue()
    assert "/v1/completions" in text
    for word in (*KEYS, "wrong", "secret words"):
        assert word not in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("short\n", ":1: a key needs at least 16 characters"),
        ("# none\n\n", "no API key in it"),
        ("a" * 20 + "\nwith a space 0123456789\n", ":2: a key is one word"),
    ],
)
def test_bad_key_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)) as refusal:
        read_keys(path)
    assert "with a space" not in str(refusal.value)
    with pytest.raises(OSError, match="missing"):
        read_keys(tmp_path / "missing")
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8 at byte 0"):
        read_keys(path)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(ValueError, match="is not a file"):
            read_keys(other)
    with path.open("wb") as file:
        file.truncate(2**20 + 1)
    with pytest.raises(ValueError, match="1048577 bytes; at most 1048576"):
        read_keys(path)
    assert not read_keys(None) and read_keys(None).accepts({})


def test_large_bodies_are_not_read(start: Callable[..., Any]) -> None:
    server = start("server.max_body_bytes=2KiB")
    fits = json.dumps({"prompt": "a", "max_tokens": 1}).encode().ljust(2048)
    assert server.post("/v1/completions", fits).status_code == 200
    for body in (fits + b" ", (part for part in [fits, b" "])):
        answer = server.post_stream("/v1/completions", body)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
        assert "at most 2048" in answer.json()["error"]["message"]
    assert server.post("/tokenize", fits + b" ").status_code == 413


def test_requests_have_ids_and_probes_no_lines(start: Callable[..., Any], log: io.StringIO) -> None:
    server = start()

    def wait_for_lines(count: int) -> None:
        """A line comes just after its answer, and may come after the line of the next one."""
        server.wait_until(lambda: log.getvalue().count('"decodegrid.access"') == count)

    body: Any = {"prompt": "secret words", "max_tokens": 2}
    answer = server.post("/v1/completions", body, **{"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    wait_for_lines(1)
    made = server.post("/v1/completions?key=hidden", body, **{"x-request-id": "a b"})
    assert made.headers["x-request-id"].startswith("req-")
    wait_for_lines(2)
    for path in ("/live", "/ready", "/health", "/metrics"):
        assert server.get(path)[0] == 200
    server.get("/nothing")
    server.stop()
    text = log.getvalue()
    lines = [json.loads(line) for line in text.splitlines()]
    access = [line for line in lines if line["logger"] == "decodegrid.access"]
    assert [(line["path"], line["status"]) for line in access] == [
        ("/v1/completions", 200), ("/v1/completions", 200), ("/nothing", 404),
    ]  # fmt: skip
    assert access[0]["request_id"] == "mine-1" and access[0]["level"] == "info"
    assert answer.json()["id"] == f"cmpl-{access[0]['id']}"
    assert any(access[0]["id"] in line["message"] for line in lines), "the engine's own lines"
    assert "hidden" not in text and "secret" not in text


def test_metrics_count_what_was_done(start: Callable[..., Any]) -> None:
    server = start()
    body: Any = {"model": "tiny", "prompt": [20] * 11, "temperature": 0, "max_tokens": 20}
    for _ in range(3):
        server.client().completions.create(**body)
    server.client().completions.create(**body, n=2)
    server.post("/v1/completions", {"nonsense": 1})
    text = server.get("/metrics")[1]
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        assert families[name].type == "gauge" and families[name].samples[0].value == 0
    assert server.metric("vllm:request_success_total", finished_reason="length") == 5
    assert server.metric("vllm:prompt_tokens_total") == 44
    assert server.metric("vllm:generation_tokens_total") == 100
    assert server.metric("vllm:e2e_request_latency_seconds_count") == 4
    assert server.metric("vllm:time_to_first_token_seconds_count") == 4
    assert server.metric("vllm:request_generation_tokens_sum") == 100
    assert server.metric("decodegrid_requests_rejected_total", status="400") == 1
    responses = "decodegrid_http_responses_total"
    # Answers are counted once they are sent.
    server.wait_until(lambda: server.metric(responses, status="400") == 1)
    assert server.metric("decodegrid_compilations_after_ready_total") == 0
    steps = server.metric("decodegrid_decode_steps_total")
    assert steps > 0 and server.metric("decodegrid_graph_hits_total") == steps
    assert server.metric("decodegrid_pad_rows_total") >= 0
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    rows = server.metric("decodegrid_decode_rows_total")
    # Every row emits one token beside those that were accepted.
    assert accepted + rows == 100
    by_place = [
        server.metric("decodegrid_drafts_accepted_total", position=str(place))
        for place in range(1, 6)
    ]
    assert sum(by_place) == accepted and by_place == sorted(by_place, reverse=True)
    verified = server.metric("decodegrid_drafts_verified_total")
    assert verified == server.metric("vllm:spec_decode_num_draft_tokens_total") >= accepted
    server.get("/any/" + "x" * 20)
    server.wait_until(lambda: server.metric(responses, path="other", status="404") == 1)


def test_the_phases_of_requests_have_the_fields_names(start: Callable[..., Any]) -> None:
    server = start()
    body: Any = {"model": "tiny", "prompt": [20] * 11, "max_tokens": 20, "n": 3}
    server.client().completions.create(**body)
    server.client().completions.create(**{**body, "max_tokens": 1, "n": 1})

    def total(name: str) -> float:
        value: float = server.metric(f"vllm:request_{name}_seconds_sum")
        return value

    for name, count in (
        ("request_queue_time_seconds", 2),
        ("request_prefill_time_seconds", 2),
        ("request_decode_time_seconds", 2),
        ("request_inference_time_seconds", 2),
        # One token alone has no time between tokens.
        ("request_time_per_output_token_seconds", 1),
        ("request_params_n", 2),
        ("request_params_max_tokens", 2),
    ):
        assert server.metric(f"vllm:{name}_count") == count, name
    assert server.metric("vllm:request_params_n_sum") == 4
    assert server.metric("vllm:request_params_max_tokens_sum") == 21
    inference = total("inference_time")
    assert inference == pytest.approx(total("prefill_time") + total("decode_time"))
    e2e = server.metric("vllm:e2e_request_latency_seconds_sum")
    assert e2e == pytest.approx(total("queue_time") + inference)
    for name in ("process_resident_memory_bytes", "process_open_fds"):
        assert server.metric(name) > 0
    for reason in ("not reading", "not asking"):
        assert server.metric("decodegrid_connections_dropped_total", reason=reason) == 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("server.port=65536", "server.port"),
        ("server.max_body_bytes=1000", "server.max_body_bytes"),
        ("server.max_body_bytes=true", "server.max_body_bytes"),
        ("server.stall_exit_s=1", "at least server.stall_s = 60, got 1"),
        ("server.api_keys=[a]", "here it is server.api_keys_file"),
        ("server.host=", "server.host"),
    ],
)
def test_what_the_section_refuses(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(None, [override])
