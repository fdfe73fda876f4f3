"""Requests with a grammar through the whole engine, over a toy model whose drafts are a switch."""

import importlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from decodegrid.configs.grammar_section import StructuredOutputsSection
from decodegrid.engine import grammar_compiler
from decodegrid.engine.async_llm import AsyncLLM
from decodegrid.engine.grammar_compiler import GrammarCompiler
from decodegrid.engine.grammar_params import GrammarSource, StructuredOutputsParams
from decodegrid.engine.llm import LLM
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import Tokenizer

MakeRunner = Callable[..., Any]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4, "minLength": 1},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "tags"],
}


def form(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


def params(max_tokens: int = 80, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """Imported, which takes seconds, before a limit on the time of a compilation counts."""
    importlib.import_module("xgrammar")


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("drafts", [99, 0, "mixed", "random"])
def test_schema_with_drafts_right_wrong_and_mixed_beside_a_free_request(
    make_runner: MakeRunner, tokenizer: Tokenizer, drafts: Any, is_async: bool
) -> None:
    """Case C8: valid JSON, the free row's ids those of the row alone, and no row has the others'
    masks."""
    prompts = [[20, 21, 22], [30, 31], [40], [50, 51, 52, 53]]
    forms = [None, form(json=SCHEMA, disable_any_whitespace=True), form(regex="[a-c]{5,9}x"),
             form(choice=["yes", "no", "maybe"])]  # fmt: skip
    outputs = []
    for chosen in (drafts, 0):
        llm = LLM.from_runner(make_runner(drafts=chosen), tokenizer, async_scheduling=is_async)
        made = llm.generate(prompts, [params(structured_outputs=each) for each in forms])
        outputs.append([output.outputs[0].token_ids for output in made])
    alone = LLM.from_runner(make_runner(drafts=drafts), tokenizer).generate([prompts[0]], params())
    free, schema, regex, choice = (output.outputs[0] for output in made)
    assert free.token_ids == alone[0].outputs[0].token_ids and free.finish_reason == "length"
    found = json.loads(schema.text)
    assert list(found) == ["name", "tags"] and 1 <= len(found["name"]) <= 4
    assert 1 <= len(found["tags"]) <= 2 and set(found["tags"]) <= {"a", "bb"}
    assert re.fullmatch("[a-c]{5,9}x", regex.text) and choice.text in ("yes", "no", "maybe")
    assert {schema.finish_reason, regex.finish_reason, choice.finish_reason} == {"stop"}
    assert outputs[0] == outputs[1], "the drafts changed the text"


def script_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text)[1:]


@pytest.mark.parametrize("drafts", [99, 0])
def test_grammar_that_ends_inside_an_accepted_block_drops_the_rest(
    make_runner: MakeRunner, scripted: Any, tokenizer: Tokenizer, drafts: int, is_async: bool
) -> None:
    """Five right drafts a step; the text is complete at the second of the last block. No end of
    text is needed, and nothing behind it is in ids, logprobs or counts."""
    script = script_of(tokenizer, "{}ab}cdefghijkl")
    runner = make_runner(drafts=drafts, model=scripted(2, script))
    llm = LLM.from_runner(runner, tokenizer, async_scheduling=is_async)
    asked = params(structured_outputs=form(regex="\\{\\}ab\\}cd"), logprobs=1, ignore_eos=True)
    output = llm.generate([[20, 21]], asked)[0]
    made = output.outputs[0]
    assert made.text == "{}ab}cd" and made.finish_reason == "stop" and made.stop_reason is None
    assert list(made.token_ids) == script[:7] and len(made.logprobs or ()) == 7
    assert output.num_accepted == (5 if drafts else 0)


def test_end_of_text_only_where_the_text_is_complete(
    make_runner: MakeRunner, scripted: Any, tokenizer: Tokenizer
) -> None:
    """The model wants to end at once; the mask lets it only behind a whole text."""
    eos = tokenizer.eos_token_id
    runner = make_runner(model=scripted(1, [eos] * 20))
    llm = LLM.from_runner(runner, tokenizer)
    made = llm.generate([[20]], params(structured_outputs=form(regex="(ab)+")))[0].outputs[0]
    assert made.text == "ab" and made.token_ids[-1] == eos and made.finish_reason == "stop"
    # With ignore_eos the end of the grammar's text still is the end.
    asked = params(structured_outputs=form(regex="(ab)+"), ignore_eos=True)
    assert llm.generate([[20]], asked)[0].outputs[0].token_ids == made.token_ids


def test_order_of_reasons_with_a_grammar(
    make_runner: MakeRunner, scripted: Any, tokenizer: Tokenizer, is_async: bool
) -> None:
    script = script_of(tokenizer, "abcdef")
    llm = LLM.from_runner(
        make_runner(model=scripted(1, script)), tokenizer, async_scheduling=is_async
    )

    def finish(**fields: Any) -> tuple[str, Any, Any]:
        asked = params(structured_outputs=form(regex="abcdef"), **fields)
        made = llm.generate([[20]], asked)[0].outputs[0]
        return made.text, made.finish_reason, made.stop_reason

    assert finish(stop="cd") == ("ab", "stop", "cd")
    assert finish(stop_token_ids=[script[3]]) == ("abcd", "stop", script[3])
    assert finish(max_tokens=3) == ("abc", "length", None)
    # With the last token the grammar ends first, then the stop string, the stop token, the length.
    everything = {"stop": "ef", "stop_token_ids": [script[5]], "max_tokens": 6}
    assert finish(**everything) == ("abcdef", "stop", None)


def test_trigger_ids_free_the_text_before_them(
    make_runner: MakeRunner, scripted: Any, tokenizer: Tokenizer, is_async: bool
) -> None:
    """The trigger and the first tokens of the form come in one block of right drafts."""
    free = script_of(tokenizer, "xyx")
    script = [*free, 7, 6, 7, 6, 5, *script_of(tokenizer, "1zz")]
    for drafts in (99, 0):
        llm = LLM.from_runner(
            make_runner(model=scripted(1, script), drafts=drafts),
            tokenizer,
            async_scheduling=is_async,
        )
        asked = form(regex="[0-9]{3}", trigger_token_ids=[7, 6, 5])
        made = llm.generate([[20]], params(structured_outputs=asked))[0].outputs[0]
        assert list(made.token_ids[:8]) == script[:8]
        assert re.fullmatch("xyx1[0-9]{2}", made.text) and made.finish_reason == "stop"


def test_completions_follow_the_grammar_each_for_itself(
    make_runner: MakeRunner, tokenizer: Tokenizer
) -> None:
    llm = LLM.from_runner(make_runner(), tokenizer)
    asked = SamplingParams(
        temperature=1.0, seed=3, n=4, max_tokens=40, structured_outputs=form(regex="[a-z]{6}-[0-9]")
    )
    outputs = llm.generate([[20, 21]], asked)[0].outputs
    assert all(re.fullmatch("[a-z]{6}-[0-9]", made.text) for made in outputs)
    assert len({made.text for made in outputs}) > 1


def test_preempted_requests_go_on_in_their_grammars(
    make_runner: MakeRunner, tokenizer: Tokenizer, is_async: bool
) -> None:
    """A pool for less than two texts: the text is the same as with room for all."""
    asked = [params(structured_outputs=form(regex=f"{char}{{20,30}}[0-9]{{8}}")) for char in "abc"]
    prompts = [[20, 21, 22], [30, 31], [40]]
    texts = []
    for num_blocks in (0, 14):
        runner = make_runner(num_blocks=num_blocks)
        llm = LLM.from_runner(runner, tokenizer, async_scheduling=is_async)
        # Compiled ahead: a text might end before the grammar of the next one is there.
        llm.generate(prompts, [replace(each, max_tokens=1) for each in asked])
        outputs = llm.generate(prompts, [replace(each, max_tokens=45) for each in asked])
        texts.append([output.outputs[0].text for output in outputs])
        for char, text in zip("abc", texts[-1], strict=True):
            assert re.fullmatch(f"{char}{{20,30}}[0-9]{{8}}", text)
    assert sum(output.num_preemptions for output in outputs) > 0
    assert texts[0] == texts[1]


def test_a_dead_grammar_fails_its_request_alone(
    make_runner: MakeRunner, tokenizer: Tokenizer, is_async: bool
) -> None:
    """At the start, behind some text, and where the vocabulary has no token for what must come;
    the others' ids are what they are alone."""
    llm = LLM.from_runner(make_runner(), tokenizer, async_scheduling=is_async)
    dead = [form(grammar="root ::= root"), form(grammar='root ::= "ab" end\nend ::= end')]
    alone = llm.generate([[20, 21]], params(20))[0].outputs[0].token_ids
    outputs = llm.generate(
        [[20, 21], [30], [31]],
        [params(20), *(params(structured_outputs=each) for each in dead)],
    )
    assert outputs[0].outputs[0].token_ids == alone
    for output, text in zip(outputs[1:], ["", "ab"], strict=True):
        made = output.outputs[0]
        assert made.finish_reason == "error" and made.text == text
        assert ("grammar allows no token" if text else "no text has") in str(made.error)
    assert llm.scheduler.blocks.num_free == llm.limits.num_blocks - 1


def test_compilation_fails_or_is_late_and_nobody_else_notices(
    make_runner: MakeRunner, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = StructuredOutputsSection(compile_threads=1, compile_timeout_s=3.0)
    llm = LLM.from_runner(make_runner(), tokenizer, structured_outputs=settings)
    alone = llm.generate([[20, 21]], params(20))[0].outputs[0].token_ids
    release = threading.Event()
    real = GrammarCompiler._compile

    def compile_badly(self: GrammarCompiler, source: GrammarSource) -> Any:
        if "never" in source.text:
            release.wait()
        if "broken" in source.text:
            raise RuntimeError("[01:02:03] /project/cpp/x.cc:12: no such thing")
        return real(self, source)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_badly)
    forms = [None, form(regex="broken"), form(regex="never"), form(regex="never")]
    outputs = llm.generate([[20, 21]] * 4, [params(20, structured_outputs=each) for each in forms])
    release.set()
    assert outputs[0].outputs[0].token_ids == alone
    broken, late, also_late = (output.outputs[0] for output in outputs[1:])
    assert broken.error == "the grammar does not compile: no such thing"
    assert "not compiled after 3 s" in str(late.error) and also_late.error == late.error
    assert {made.finish_reason for made in (broken, late, also_late)} == {"error"}
    again = llm.generate([[20]], params(structured_outputs=form(regex="never")))[0].outputs[0]
    assert again.text == "never", "the late grammar serves the next request"


def test_requests_that_wait_for_a_grammar_hold_up_nobody_and_can_be_aborted(
    make_runner: MakeRunner, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM.from_runner(make_runner(max_num_reqs=1), tokenizer)
    release = threading.Event()
    real = GrammarCompiler._compile

    def compile_late(self: GrammarCompiler, source: GrammarSource) -> Any:
        release.wait()
        return real(self, source)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_late)
    table = llm.stream_table
    waiting = [table.build([20], params(structured_outputs=form(regex="ab"))) for _ in range(2)]
    free = table.build([21, 22], params(8))
    table.open([*waiting, free])
    while not free.is_finished:
        table.step()
    assert not any(stream.is_finished for stream in waiting) and table.has_unfinished
    assert table.abort(waiting[0].request_id) is waiting[0]
    assert waiting[0].output().outputs[0].finish_reason == "abort"
    release.set()
    while not waiting[1].is_finished:
        table.step()
    assert waiting[1].output().outputs[0].text == "ab" and not table.has_unfinished
    table.discard([*waiting, free])


def test_grammars_of_requests_that_left_hold_up_no_other(
    make_runner: MakeRunner, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has not begun is not compiled for nobody; what others wait for is."""
    settings = StructuredOutputsSection(compile_threads=1)
    llm = LLM.from_runner(make_runner(), tokenizer, structured_outputs=settings)
    begun, release = threading.Event(), threading.Event()
    real, compiled = GrammarCompiler._compile, []

    def compile_one(self: GrammarCompiler, source: GrammarSource) -> Any:
        begun.set()
        release.wait(60)
        compiled.append(source.text)
        return real(self, source)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_one)
    table = llm.stream_table
    texts = ["begun", *(f"left{i}" for i in range(9)), "kept", "kept"]
    streams = [
        table.build([20], params(structured_outputs=form(regex=text)), check_grammar=False)
        for text in texts
    ]
    table.open(streams)
    assert begun.wait(60)
    for stream in streams[:-1]:
        assert table.abort(stream.request_id) is stream
    release.set()
    while not streams[-1].is_finished:
        table.step()
    assert streams[-1].output().outputs[0].text == "kept"
    assert compiled == ["begun", "kept"]
    table.discard(streams)


@pytest.fixture
def used_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads in which the grammar library checked or compiled something."""
    threads: list[str] = []
    check, compile_it = grammar_compiler.check_grammar, GrammarCompiler._compile

    def watched_check(source: GrammarSource) -> None:
        threads.append(threading.current_thread().name)
        check(source)

    def watched_compile(self: GrammarCompiler, source: GrammarSource) -> Any:
        threads.append(threading.current_thread().name)
        return compile_it(self, source)

    monkeypatch.setattr(grammar_compiler, "check_grammar", watched_check)
    monkeypatch.setattr(GrammarCompiler, "_compile", watched_compile)
    return threads


def test_the_library_is_used_in_the_compilers_threads_alone(
    make_runner: MakeRunner, tokenizer: Tokenizer, used_in: list[str]
) -> None:
    """The first use imports it, which takes seconds."""
    llm = LLM.from_runner(make_runner(), tokenizer)
    asked = params(structured_outputs=form(regex="ab"))
    assert llm.generate([[20]], asked)[0].outputs[0].text == "ab"
    assert len(used_in) == 2 and all(name.startswith("grammar-") for name in used_in)


def test_a_check_that_takes_too_long_is_left_to_the_limit_of_the_request(
    make_runner: MakeRunner, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = StructuredOutputsSection(compile_threads=1, compile_timeout_s=0.2)
    llm = LLM.from_runner(make_runner(), tokenizer, structured_outputs=settings)
    release = threading.Event()
    monkeypatch.setattr(grammar_compiler, "check_grammar", lambda source: release.wait())
    made = llm.generate([[20]], params(structured_outputs=form(regex="ab")))[0].outputs[0]
    assert made.finish_reason == "error" and "not compiled after 0.2 s" in str(made.error)
    release.set()
    assert llm.generate([[20]], params(8))[0].outputs[0].finish_reason == "length"


def test_an_async_caller_waits_for_no_grammar(
    make_runner: MakeRunner, tokenizer: Tokenizer, used_in: list[str]
) -> None:
    """submit() returns while the library is still busy; what is no grammar ends as an error."""
    engine = AsyncLLM(LLM.from_runner(make_runner(), tokenizer))
    with_grammar = engine.submit([20], params(structured_outputs=form(regex="ab")))
    refused = engine.submit([20], params(structured_outputs=form(grammar='start ::= "a"')))
    assert threading.current_thread().name not in used_in
    assert with_grammar.result(60).outputs[0].text == "ab"
    made = refused.result(60).outputs[0]
    assert made.finish_reason == "error"
    assert "the grammar does not compile: " in str(made.error) and "root" in str(made.error)
    engine.close()
    assert used_in and all(name.startswith("grammar-") for name in used_in)


def test_what_cannot_be_a_grammar_is_refused_before_anything_is_queued(
    make_runner: MakeRunner, tokenizer: Tokenizer
) -> None:
    llm = LLM.from_runner(make_runner(), tokenizer)
    for fields, words in (
        ({"regex": "(a"}, "parenthesis is not closed"),
        ({"regex": "a(?=b)"}, "Lookahead is not supported"),
        ({"grammar": 'start ::= "a"'}, "root"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "minLength"),
    ):
        with pytest.raises(RequestError, match=re.escape(words)) as caught:
            llm.generate([[20]], params(structured_outputs=form(**fields)))
        assert str(caught.value).startswith(f"structured_outputs.{next(iter(fields))}")
        assert "/project/" not in str(caught.value)
    assert not llm.stream_table.has_unfinished
    runner = make_runner()
    runner.has_rich = False
    plain = LLM.from_runner(runner, tokenizer)
    with pytest.raises(RequestError, match="structured_outputs is not served"):
        plain.generate([[20]], params(structured_outputs=form(json_object=True)))
    with pytest.raises(RequestError, match="trigger token id 0 is 999"):
        llm.generate([[20]], params(structured_outputs=form(regex="a", trigger_token_ids=[999])))


def test_whole_vocabulary_of_special_tokens_is_never_text(
    make_runner: MakeRunner, scripted: Any, tokenizer: Tokenizer
) -> None:
    """The model wants special tokens, ids behind the bytes and the end of text in turn."""
    script = [0, 2, 7, tokenizer.eos_token_id] * 10
    llm = LLM.from_runner(make_runner(model=scripted(1, script)), tokenizer)
    made = llm.generate([[20]], params(structured_outputs=form(regex=".{4}")))[0].outputs[0]
    assert len(made.text) == 4 and made.finish_reason == "stop"
    assert all(tokenizer.token_bytes(token_id) for token_id in made.token_ids)


@pytest.mark.parametrize("nothing", [{"grammar": "root ::= root"}, {"regex": r"[^\s\S]"}])
def test_a_form_that_no_text_has_is_told_before_a_token_is_made(
    make_runner: MakeRunner, tokenizer: Tokenizer, nothing: dict[str, str]
) -> None:
    llm = LLM.from_runner(make_runner(), tokenizer)
    made = llm.generate([[20, 21]], params(structured_outputs=form(**nothing)))[0].outputs[0]
    assert made.finish_reason == "error" and made.token_ids == ()
    assert made.error == "structured_outputs: no text has this form, not even an empty one"
