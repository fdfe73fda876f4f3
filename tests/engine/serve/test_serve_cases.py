"""`decodegrid serve`: hard cases of speculative decoding behind an API, by the names of their list.

C6 is test_serve_api.py's.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import jsonschema
import openai
import pytest

from decodegrid.configs.load import LoadedConfig
from decodegrid.configs.sampling_section import SamplingSection
from decodegrid.engine import server_log
from decodegrid.engine.batch_body import read_body
from decodegrid.engine.cli import main
from decodegrid.engine.llm import LLM
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer

MESSAGES: Any = [{"role": "user", "content": "hi"}]
THINKING: Any = {"thinking": {"type": "enabled"}}
EOS = 1


def watch_blocks(runner: Any) -> list[list[int]]:
    """The tokens that each row of each step emitted, from now on."""
    found: list[list[int]] = []
    collect = runner.collect

    def watched(step: Any) -> Any:
        result = collect(step)
        counts = result.num_emitted.tolist()
        found.extend(
            ids[:count] for ids, count in zip(result.token_ids.tolist(), counts, strict=True)
        )
        return result

    runner.collect = watched
    return found


def block_around(blocks: Sequence[list[int]], first: int, last: int) -> list[int]:
    """What was emitted behind `last` in the step that emitted both ids."""
    block = next(ids for ids in blocks if last in ids)
    place = block.index(last)
    assert first in block[: place + 1]
    return block[place + 1 :]


@pytest.mark.parametrize("stream", [False, True])
def test_c1_a_stop_string_inside_an_accepted_block(
    start: Any, scripted: Any, byte_id: Callable[[int], int], stream: bool
) -> None:
    """C1: it spans two tokens of one step, which accepts three more behind them."""
    script = [byte_id(byte) for byte in b"abcdefghijkl"]
    server, _, runner = start(model=scripted(3, script), drafts=99)
    blocks = watch_blocks(runner)
    fields: Any = {"model": "tiny", "prompt": [20, 21, 22], "temperature": 0, "max_tokens": 12}
    fields |= {"stop": "bc", "logprobs": 1, "stream": stream}
    create = server.client().completions.create
    if stream:
        chunks = list(create(**fields, stream_options={"include_usage": True}))
        choices, usage = [c.choices[0] for c in chunks[:-1]], chunks[-1].usage
    else:
        answer = create(**fields)
        choices, usage = answer.choices, answer.usage
    assert "".join(choice.text for choice in choices) == "a"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert choices[-1].stop_reason == "bc"
    logprobs = [choice.logprobs for choice in choices if choice.logprobs]
    assert [token for part in logprobs for token in part.tokens] == ["a", "b", "c"]
    assert sum(len(part.token_logprobs) for part in logprobs) == 3 == usage.completion_tokens
    assert len(block_around(blocks, byte_id(ord("b")), byte_id(ord("c")))) >= 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "reasoning", "last", "count"),
    [(None, "Hm, yes .", None, 10), ("m, y", "H", "y", 5)],
    ids=["eos", "stop"],
)
def test_c5_an_end_while_reasoning_is_open(
    start: Any,
    scripted: Any,
    byte_id: Callable[[int], int],
    tokenizer: Tokenizer,
    stream: bool,
    stop: str | None,
    reasoning: str,
    last: str | None,
    count: int,
) -> None:
    """C5: the block goes on behind it; what is counted is what is delivered."""
    prompt = read_body("chat", {"messages": MESSAGES, **THINKING}, tokenizer, SamplingSection())
    script = [*map(byte_id, b"Hm, yes ."), EOS, *map(byte_id, b"and more of it")]
    server, _, runner = start(model=scripted(len(prompt.prompts[0]), script), drafts=99)
    blocks = watch_blocks(runner)
    fields: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    fields |= {"logprobs": True, "stop": stop, "stream": stream, "extra_body": THINKING}
    create = server.client().chat.completions.create
    if stream:
        chunks = list(create(**fields, stream_options={"include_usage": True}))
        choices, usage = [c.choices[0] for c in chunks[:-1]], chunks[-1].usage
        parts = [choice.delta for choice in choices]
    else:
        answer = create(**fields)
        choices, usage = answer.choices, answer.usage
        parts = [choice.message for choice in choices]
    text = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
    assert text == reasoning and not any(part.content for part in parts)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    delivered = sum(len(c.logprobs.content) for c in choices if c.logprobs)
    assert delivered == usage.completion_tokens == count
    assert usage.completion_tokens_details.reasoning_tokens <= count
    end = EOS if last is None else byte_id(ord(last))
    assert block_around(blocks, end, end), "nothing was accepted behind the end"


class RightDrafts:
    """Before each step, the drafts of a slot become what its request will emit."""

    def __init__(self, runner: Any, texts: dict[int, list[int]]) -> None:
        """texts: prompts and outputs by the seeds of their requests."""
        self._state, self._texts = runner.model.state.slots, texts
        self._seeds: dict[int, int] = {}
        self._num_drafts = runner.num_draft_tokens
        start = runner.start

        def start_and_note(slot: int, request: Any, block_ids: Sequence[int]) -> None:
            self._seeds[slot] = request.seed
            start(slot, request, block_ids)

        runner.start = start_and_note
        for name in ("launch", "launch_forward"):
            setattr(runner, name, self._planting(getattr(runner, name)))

    def _planting(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def plant_and_launch(slots: Sequence[int], total: int) -> Any:
            for slot in slots:
                length = int(self._state.seq_len[slot])
                right = self._texts[self._seeds[slot]][length : length + self._num_drafts]
                right += [0] * (self._num_drafts - len(right))
                for place, token_id in enumerate(right):
                    self._state.drafts[slot, place] = token_id
            return launch(slots, total)

        return plant_and_launch


def test_c7_filters_bias_and_penalties_with_right_drafts(
    serve: Any,
    make_model: Callable[..., Any],
    make_eager_runner: Callable[..., Any],
    layer_changes: Any,
    tokenizer: Tokenizer,
) -> None:
    """C7: what comes with every draft accepted is what comes without drafts."""
    model = make_model(vocab_size=tokenizer.vocab_size, **layer_changes[2])
    # It repeats itself then, which a penalty changes.
    model.head.weight[9::40] *= 3.0
    cases: list[dict[str, Any]] = [
        {"min_p": 0.5, "temperature": 1.0},
        {"logit_bias": {49: -100.0, 40: 1.5}, "temperature": 0.0},
        {"frequency_penalty": 2.0, "temperature": 0.0},
        {"min_tokens": 7, "stop_token_ids": list(range(100, 266)), "temperature": 0.0},
    ]
    neutral: Any = {"min_p": 0.0, "logit_bias": None, "frequency_penalty": 0.0, "min_tokens": 0}
    prompt = [20, 21, 22]
    with LLM.from_runner(make_eager_runner(model, rich=True), tokenizer) as llm:

        def ids_of(seed: int, case: Any) -> list[int]:
            params = SamplingParams(max_tokens=9, seed=seed, speculation="off", **case)
            return list(llm.generate([prompt], params)[0].outputs[0].token_ids)

        wanted = [ids_of(seed, case) for seed, case in enumerate(cases)]
        for seed, case in enumerate(cases):
            assert wanted[seed] != ids_of(seed, {**case, **neutral}), "the field does nothing"
    texts = {seed: [*prompt, *ids] for seed, ids in enumerate(wanted)}

    def build() -> LLM:
        runner = make_eager_runner(model, rich=True)
        RightDrafts(runner, texts)
        return LLM.from_runner(runner, tokenizer)

    server = serve(build, "scheduler.max_model_len=64", "scheduler.max_num_reqs=3")
    bodies = [
        {"prompt": prompt, "max_tokens": 9, "seed": seed, "logprobs": 0, **case}
        for seed, case in enumerate(cases)
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: server.post("/v1/completions", body).json(), bodies))
    for answer, ids in zip(answers, wanted, strict=True):
        assert answer["choices"][0]["text"] == tokenizer.decode(ids)
        assert answer["usage"]["completion_tokens"] == len(ids)
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert accepted >= sum(len(ids) - 1 for ids in wanted) / 2
    assert accepted == sum(answer["speculation"]["num_accepted"] for answer in answers)


SCHEMA: Any = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bc"]}},
    "required": ["ok", "kind"],
}


@pytest.mark.parametrize("drafts", [0, 99], ids=["wrong", "right"])
def test_c8_a_schema_among_free_requests(
    start: Any, hold: Any, toy: Any, tokenizer: Tokenizer, drafts: int
) -> None:
    """C8: drafts that are wrong or right and none, masked rows and free ones, in one batch."""
    server, llm, runner = start(drafts=drafts, max_num_reqs=6)
    form: Any = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    # The grammar is there from now on: the free rows might end while it is compiled.
    assert server.post("/v1/completions", {"prompt": [20], **form}).status_code == 200
    gate = hold(runner, "launch")
    choice_gate = hold(runner, "launch_forward")
    bodies: list[dict[str, Any]] = []
    for number, speculation in enumerate(["auto", "off", 2]):
        common: Any = {"model": "tiny", "temperature": 0, "speculation": speculation}
        bodies.append({**common, "prompt": [20, number + 30], "max_tokens": 200})
        bodies.append({**common, "prompt": [21, number + 30], "max_tokens": 390, **form})
    with ThreadPoolExecutor(len(bodies)) as pool:
        found = [pool.submit(server.post, "/v1/completions", body) for body in bodies]
        engine = server.state.health.engine
        server.wait_until(lambda: engine.num_open == len(bodies))
        pump(server, (gate, choice_gate), lambda: len(llm.scheduler.running) == len(bodies))
        gate.open()
        choice_gate.open()
        answers = [answer.result().json() for answer in found]
    assert max(entry[1] for entry in runner.log if entry[0] == "decode") == len(bodies)
    for body, answer in zip(bodies, answers, strict=True):
        (choice,) = answer["choices"]
        if "structured_outputs" in body:
            jsonschema.validate(json.loads(choice["text"]), SCHEMA)
            assert choice["finish_reason"] == "stop"
        else:
            assert choice["text"] == tokenizer.decode(toy.generate(body["prompt"], 200))


def soon(is_so: Callable[[], bool]) -> None:
    """Wait for what comes within milliseconds; fails where it does not within a minute."""
    deadline = monotonic() + 60
    while not is_so():
        assert monotonic() < deadline, "it did not happen"
        sleep(0.0005)


def pump(server: Any, gates: Sequence[Any], is_so: Callable[[], bool]) -> None:
    """Let the engine take single steps, whatever kind comes next, until something is so; no more
    of them than it needs, however late the event loop sees what a step brought."""
    while True:
        soon(lambda: any(gate.num_waiting for gate in gates))
        server.take_in(2)
        if is_so():
            return
        let_one_pass(gates)


def let_one_pass(gates: Sequence[Any]) -> None:
    """Let the step go on before which the engine stands."""
    gate = next(gate for gate in gates if gate.num_waiting)
    before = gate.num_passed
    gate.allow()
    soon(lambda: gate.num_passed == before + 1)


def test_c18_the_length_of_the_context(start: Any, tokenizer: Tokenizer) -> None:
    """C18: chats of the limit's length less one, of it, and of one more; completions are
    test_serve_api.py's."""
    server, _, _ = start()
    client = server.client()

    def chat(num_prompt: int, **fields: Any) -> Any:
        content = "a" * (num_prompt - empty)
        messages: Any = [{"role": "user", "content": content}]
        return client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, **fields
        )

    asked = {"messages": [{"role": "user", "content": "a"}]}
    empty = server.post("/tokenize", asked).json()["count"] - 1
    assert chat(399).usage.prompt_tokens == 399
    for num_prompt, fields, param, numbers in (
        (400, {}, "messages", ("400", "399")),
        (401, {}, "messages", ("400", "401")),
        (399, {"max_tokens": 2}, "max_tokens", ("400", "401", "399")),
        (398, {"max_completion_tokens": 3}, "max_completion_tokens", ("400", "401", "398")),
    ):
        with pytest.raises(openai.BadRequestError) as refusal:
            chat(num_prompt, **fields)
        assert refusal.value.code == "context_length_exceeded" and refusal.value.param == param
        assert all(number in str(refusal.value) for number in numbers)
        assert chat(100, max_tokens=3).usage.completion_tokens == 3


def test_c20_the_command_line_wins_over_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C20: its origin is shown, and what needs another mode than the one set is an error."""
    path = tmp_path / "x.yaml"
    path.write_text("server:\n  port: 8001\n  model_name: of-the-file\nmodel: {num_threads: 2}\n")
    show = ["config", "show", "--config", str(path)]
    assert main([*show, "--set", "server.model_name=of-the-line"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {row[0]: (row[1].strip('"'), row[-1]) for row in rows}
    assert shown["server.model_name"] == ("of-the-line", "--set")
    assert shown["server.port"] == ("8001", "x.yaml:2")
    assert shown["server.host"] == ("127.0.0.1", "default")
    served: list[LoadedConfig] = []
    # Its handler would keep the stream of this test.
    monkeypatch.setattr(server_log, "configure_logging", lambda level: None)

    def build(loaded: LoadedConfig) -> LLM:
        served.append(loaded)
        raise ValueError("built")

    serve = ["serve", "--config", str(path)]
    assert main([*serve, "--port", "0", "--set", "model.num_threads=1"], build) == 2
    (loaded,) = served
    assert (loaded.config.server.port, loaded.origins["server.port"]) == (0, "--set")
    assert (loaded.config.model.num_threads, loaded.origins["model.num_threads"]) == (1, "--set")
    assert loaded.config.server.model_name == "of-the-file"
    capsys.readouterr()
    path.write_text("speculation: {verify: rejection, budget_rates: fresh}\n")
    assert main(serve, build) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'speculation.budget_rates: must be "delayed" with speculation.verify' in line
    assert f"{path}:1:" in line and len(served) == 1


def test_c21_a_hundred_clients_go(
    start: Any, hold: Any, idle: Any, toy: Any, tokenizer: Tokenizer
) -> None:
    """C21: in the middle of a stream or of its wait for the whole, and while the prompt is
    computed, with either; another request goes on beside all of them."""
    server, llm, runner = start("scheduler.max_model_len=2000", max_model_len=2000)
    scheduler = llm.scheduler
    gates = hold(runner, "prefill"), hold(runner, "launch")
    other = server.send(
        {"prompt": [20, 21], "max_tokens": 1500, "stream": True, "speculation": "off"}
    )
    pump(server, gates, lambda: len(scheduler.running) == 1)
    for number in range(100):
        in_prefill, stream = number % 2 == 1, number % 4 < 2
        size = 100 if in_prefill else 3
        gone = server.send({"prompt": [22] * size, "max_tokens": 1000, "stream": stream})
        soon(lambda: len(server.state.queue.open_ids) == 2)
        if in_prefill:
            pump(server, gates, lambda: gates[0].num_waiting == 1)
        else:
            ticket = server.state.queue._tickets[server.state.queue.open_ids[1]]
            pump(server, gates, lambda: ticket.has_started)  # noqa: B023
        assert scheduler.slots.num_free == scheduler.slots.num_usable - 2
        gone.close()
        soon(lambda: len(server.state.queue.open_ids) == 1)
        steps = sum(gate.num_passed for gate in gates)
        let_one_pass(gates)
        soon(lambda: any(gate.num_waiting for gate in gates))
        assert sum(gate.num_passed for gate in gates) == steps + 1
        # The engine stands before its next step.
        (left,) = scheduler.running
        assert scheduler.slots.num_free == scheduler.slots.num_usable - 1
        assert scheduler.blocks.num_usable - scheduler.blocks.num_free == len(left.block_ids)
    for gate in gates:
        gate.open()
    assert server.metric("decodegrid_requests_aborted_total", cause="client") == 100
    assert server.metric("decodegrid_requests_aborted_total") == 100
    parts = server.read_stream(other).split(b"data: ")[1:-1]
    texts = [json.loads(part.split(b"\n\n")[0])["choices"][0]["text"] for part in parts]
    assert "".join(texts) == tokenizer.decode(toy.generate([20, 21], 1500))
    server.wait_until(lambda: idle(llm) and not server.state.queue.open_ids)
    assert server.state.queue.num_open == 0 == server.state.queue.num_waiting_tokens
    assert server.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("include_usage", [None, False, True])
@pytest.mark.parametrize("end", ["stop", "length", "abort"])
def test_c22_the_end_of_a_stream(
    start: Any, hold: Any, tokenizer: Tokenizer, toy: Any, path: str, include_usage: Any, end: str
) -> None:
    """C22: one finish reason; the usage last where it was asked for, and nowhere else; [DONE]."""
    server, _, runner = start(drafts=2)
    body: Any = {"model": "tiny", "temperature": 0, "max_tokens": 30, "stream": True}
    body |= {"prompt": [20, 21]} if path == "completions" else {"messages": MESSAGES}
    if include_usage is not None:
        body["stream_options"] = {"include_usage": include_usage}
    if end == "stop":
        ids = [20, 21]
        if path != "completions":
            ids = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
        body |= {"stop_token_ids": toy.generate(ids, 8)[7:]}
    gate = hold(runner, "launch", permits=2)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, f"/v1/{path}", body)
        server.wait_until(lambda: gate.num_waiting == 1)
        if end == "abort":
            engine = server.state.health.engine
            assert engine.abort(server.state.queue.open_ids[0])
        gate.open()
        text = answer.result().text
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    if include_usage:
        usage = chunks.pop()
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] >= 1
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [end]
    if include_usage and end != "abort":
        assert usage["usage"]["completion_tokens"] == (8 if end == "stop" else 30)


def test_c26_common_fields_are_honoured(start: Any, tokenizer: Tokenizer, toy: Any) -> None:
    """C26: each changes what comes, and is refused by its name where it cannot."""
    server, _, _ = start()
    client = server.client()
    prompt = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]

    def chat(**fields: Any) -> Any:
        options: Any = {"temperature": 1.0, "seed": 5, "max_completion_tokens": 20, **fields}
        return client.chat.completions.create(model="tiny", messages=MESSAGES, **options)

    def text_of(seed: int, count: int = 20) -> str:
        return tokenizer.decode(toy.generate(prompt, count, 1.0, seed))

    plain = chat().choices[0]
    assert plain.message.content == text_of(5) and plain.logprobs is None
    assert chat(seed=6).choices[0].message.content == text_of(6) != text_of(5)
    several = chat(n=3).choices
    assert several[0].message.content == text_of(5)
    assert len({choice.message.content for choice in several}) == 3
    place = next(i for i in range(2, 15) if "\ufffd" not in text_of(5)[i : i + 2])
    stop = text_of(5)[place : place + 2]
    stopped = chat(stop=stop).choices[0]
    assert stopped.message.content == text_of(5)[: text_of(5).index(stop)]
    assert stopped.finish_reason == "stop"
    assert len(chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content) == 20
    assert chat(max_completion_tokens=7).usage.completion_tokens == 7
    assert chat(stream=False).object == "chat.completion"
    for fields, param in (
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": "\ud800"}, "stop"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 5}, "max_tokens"),
        ({"stream": "false"}, "stream"),
    ):
        # By hand: the client cannot write a lone surrogate.
        found = server.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
        assert found.status_code == 400 and found.json()["error"]["param"] == param, found.text
    assert chat().choices[0].message.content == text_of(5)
