"""The form of a text asked for in a batch line and on the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from decodegrid.configs.sampling_section import SamplingSection
from decodegrid.engine.batch_body import read_body
from decodegrid.engine.body_fields import BodyError
from decodegrid.engine.cli import _Parser, main
from decodegrid.engine.cli_options import add_grammar_options, grammar_from_options
from decodegrid.engine.grammar_compiler import GrammarCompiler
from decodegrid.engine.grammar_params import StructuredOutputsParams
from decodegrid.engine.llm import LLM
from decodegrid.engine.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}


def read(tokenizer: Tokenizer, **fields: Any) -> StructuredOutputsParams | None:
    body = {"model": "m", "prompt": "x", **fields}
    return read_body("completion", body, tokenizer, SamplingSection()).params.structured_outputs


def test_response_format_and_structured_outputs_are_honoured(tokenizer: Tokenizer) -> None:
    schema = {"name": "s", "schema": SCHEMA, "strict": True}
    for fields, want in (
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": schema}}, {"json": SCHEMA}),
        ({"structured_outputs": {"choice": ["a", "b"], "json": None}}, {"choice": ["a", "b"]}),
    ):
        found = read(tokenizer, **fields)
        assert found == (None if want is None else StructuredOutputsParams(**want))


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "json"}, "response_format", "got 'json'"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
            "not is not supported",
        ),
        ({"structured_outputs": {"regex": "a", "x": 1}}, "structured_outputs", "x is not"),
        ({"structured_outputs": {"regex": "a$b"}}, "structured_outputs", "$ at character 1"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "both given",
        ),
    ],
)
def test_bad_forms_are_refused_by_name(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(BodyError) as caught:
        read(tokenizer, **fields)
    assert caught.value.param == param and words in str(caught.value)


def test_options_of_the_command_line(tmp_path: Path) -> None:
    parser = _Parser()
    add_grammar_options(parser)
    schema, grammar = tmp_path / "s.json", tmp_path / "g.ebnf"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('root ::= "a"')
    for argv, want in (
        ([], None),
        (["--json-schema", str(schema)], {"json": SCHEMA}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--grammar", str(grammar)], {"grammar": 'root ::= "a"'}),
    ):
        found = grammar_from_options(parser.parse_args(argv))
        want_source = None if want is None else StructuredOutputsParams(**want).source
        assert (None if found is None else found.source) == want_source
    with pytest.raises(ValueError, match="not allowed with"):
        parser.parse_args(["--regex", "a", "--grammar", str(grammar)])


def test_batch_lines_and_prompts_follow_their_forms_and_failures_are_said(
    make_runner: Callable[..., Any],
    tokenizer: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM.from_runner(make_runner(), tokenizer)
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    forms = [
        {"response_format": form},
        {"structured_outputs": {"grammar": "root ::= root"}},
        {"structured_outputs": {"regex": "("}},
    ]
    lines = [
        {"custom_id": f"{index}", "method": "POST", "url": "/v1/completions",
         "body": {"prompt": [20, 21], "max_tokens": 90, "seed": 3, **fields}}
        for index, fields in enumerate(forms)
    ]  # fmt: skip
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in lines))
    main(["batch", str(source), str(target)], lambda loaded: llm)
    answers = [json.loads(line)["response"] for line in target.read_text().splitlines()]
    assert [answer["status_code"] for answer in answers] == [200, 500, 400]
    jsonschema.validate(json.loads(answers[0]["body"]["choices"][0]["text"]), SCHEMA)
    assert "no text has this form" in answers[1]["body"]["error"]["message"]
    assert answers[2]["body"]["error"]["type"] == "invalid_request_error"
    capsys.readouterr()
    assert main(["generate", "hi", "--regex", "[ab]{4}"], lambda loaded: llm) == 0
    assert set(capsys.readouterr().out.strip()) <= set("ab")
    assert main(["generate", "hi", "--regex", "(a"], lambda loaded: llm) != 0
    assert "parenthesis is not closed" in capsys.readouterr().err

    def fail(self: GrammarCompiler, source: Any) -> Any:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(GrammarCompiler, "_compile", fail)
    assert main(["generate", "hi", "--regex", "[ab]{5}"], lambda loaded: llm) != 0
    assert "does not compile: no such thing" in capsys.readouterr().err
