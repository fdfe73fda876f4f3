"""The tables of metrics and endpoints say what the program has: all of it, and nothing else."""

import ast
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from decodegrid.capture.report_explorer_section import TITLE
from decodegrid.configs.sampling_section import SamplingSection
from decodegrid.engine import batch_body, messages_body, responses_body
from decodegrid.engine.body_fields import BodyError
from decodegrid.engine.chat_body import CHAT_FIELDS
from decodegrid.engine.rich_params import RichParams
from decodegrid.engine.sampling_params import MAX_SEED, SamplingParams
from decodegrid.engine.server_front import OPEN_PATHS
from decodegrid.engine.server_schema import OPERATIONS
from decodegrid.engine.server_schema_bodies import body_schemas
from decodegrid.engine.tokenizer import Tokenizer

METRIC_TABLES = (
    "Requests", "Engine", "Grid and padding", "Drafts", "Verify budget", "Process",
)  # fmt: skip
SAMPLES: dict[str, Any] = {
    "max_tokens": 5, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.5, "seed": 5, "n": 2,
    "stop": "x", "include_stop_str_in_output": True, "stop_token_ids": [5], "ignore_eos": True,
    "skip_special_tokens": False, "speculation": 2, "min_tokens": 2, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "repetition_penalty": 1.5, "logit_bias": {5: 1.0}, "logprobs": 0,
}  # fmt: skip
"""A value of each field that RichParams is made from, unlike its default."""


def code(cell: str) -> str:
    """The one thing in backquotes of a cell."""
    (found,) = re.findall(r"`([^`]+)`", cell)
    return str(found)


def tables(page: Any, heading: str, num_columns: int) -> list[list[str]]:
    """Rows of the tables with that many columns under a heading, without repetitions."""
    rows = [row for row in page.rows(heading) if len(row) == num_columns]
    names = [row[0] for row in rows]
    assert rows and len(set(names)) == len(names), f"{heading}: {sorted(names)}"
    return rows


@pytest.fixture(scope="session")
def endpoints(pages: dict[str, Any]) -> Any:
    return pages["docs/endpoints.md"]


def test_metrics(server: Any, metrics: dict[str, Any], pages: dict[str, Any]) -> None:
    """Names, types and labels; `metrics` has counted everything before."""
    real = {}
    for family in text_string_to_metric_families(server.get("/metrics")[1]):
        if family.name.endswith("_created"):
            assert f"{family.name.removesuffix('_created')}_total" in metrics or family.samples
            continue
        labels = {name for sample in family.samples for name in sample.labels}
        assert ("model_name" in labels) is not family.name.startswith("process_")
        name = family.name + ("_total" if family.type == "counter" else "")
        real[name] = (family.type, labels - {"model_name", "le"})
    told = {}
    for heading in METRIC_TABLES:
        for name, kind, labels, meaning in tables(pages["docs/metrics.md"], heading, 4):
            told[code(name)] = (kind, set(re.findall(r"`(\w+)`", labels)))
            assert meaning
    assert told == real


def test_paths(server: Any, endpoints: Any) -> None:
    told = {
        (method, code(path)): needs_key == "yes"
        for method, path, needs_key, _ in endpoints.rows("Endpoints")
        if needs_key in ("yes", "no")
    }
    real = {(one.method.upper(), one.path): not one.is_open for one in OPERATIONS}
    assert told == {**real, ("GET", "/openapi.json"): True}
    document = server.get("/openapi.json")[1]
    paths = {(m.upper(), p) for p, item in json.loads(document)["paths"].items() for m in item}
    assert paths == real.keys()
    assert {path for (_, path), needs_key in told.items() if not needs_key} == OPEN_PATHS


def test_fields_of_chats_and_completions(endpoints: Any) -> None:
    rows = tables(endpoints, "Fields of chats and completions", 5)
    inert = inert_table(endpoints, "Fields of chats and completions", batch_body.INERT)
    for column, kind in ((1, "chat"), (2, "completion")):
        assert {row[column] for row in rows} <= {"yes", "refused", "-"}
        told = {code(row[0]) for row in rows if row[column] != "-"}
        assert told | inert == batch_body.FIELDS[kind] and not told & inert  # type: ignore[index]
    check_steps((code(row[0]), row[3]) for row in rows)


def test_limits_of_fields(endpoints: Any) -> None:
    """Where a field has two bounds, the table has them."""
    schemas: dict[str, Any] = body_schemas()
    num_compared = 0
    for name, _, _, _, text in tables(endpoints, "Fields of chats and completions", 5):
        text = text.replace("2^63 - 1", str(MAX_SEED))
        told = {(float(a), float(b)) for a, b in re.findall(r"(-?\d[\d.e-]*) to (\d[\d.e]*)", text)}
        for kind in ("ChatCompletionRequest", "CompletionRequest"):
            schema = schemas[kind]["properties"].get(code(name), {})
            for part in [schema, *schema.get("anyOf", ())]:
                if "minimum" in part and "maximum" in part:
                    assert (float(part["minimum"]), float(part["maximum"])) in told, (
                        f"{name}: {text}"
                    )
                    num_compared += 1
    assert num_compared > 15


def test_choices_of_tools(endpoints: Any, tokenizer: Tokenizer) -> None:
    """Each that the table names is taken, and a word that it does not name is not."""
    named = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [named]}

    def read(choice: Any) -> None:
        batch_body.read_body("chat", {**body, "tool_choice": choice}, tokenizer, SamplingSection())

    for cell, _ in tables(endpoints, "Tools", 2):
        read(json.loads(code(cell).replace("[...]", json.dumps([named]))))
    with pytest.raises(BodyError, match="tool_choice"):
        read("sometimes")


def test_fields_of_responses(endpoints: Any) -> None:
    rows = tables(endpoints, "Responses", 3)
    only_null = dict.fromkeys(responses_body.STATE_FIELDS, ())
    inert = inert_table(endpoints, "Responses", {**responses_body.INERT, **only_null})
    told = {code(row[0]) for row in rows}
    assert told | inert == set(responses_body.FIELDS) and not told & inert
    check_steps((code(row[0]), row[1]) for row in rows)


def test_fields_of_messages(endpoints: Any) -> None:
    rows = tables(endpoints, "Messages", 4)
    inert = inert_table(endpoints, "Messages", messages_body.INERT)
    told = {code(row[0]) for row in rows}
    assert told | inert == set(messages_body.FIELDS) and not told & inert
    counted = {code(row[0]) for row in rows if row[1] == "yes"}
    assert counted == set(messages_body.COUNT_FIELDS) - inert
    check_steps((code(row[0]), row[2]) for row in rows)


def inert_table(endpoints: Any, heading: str, real: Mapping[str, Iterable[Any]]) -> set[str]:
    """The fields with one choice, once they and their values are the program's."""
    told = {
        code(name): [json.loads(value) for value in re.findall(r"`([^`]+)`", values)]
        for name, values in tables(endpoints, heading, 2)
    }

    def spelled(values: Iterable[Any]) -> set[str]:
        # Null is said once for all; 1 and 1.0 are one number to JSON.
        return {
            json.dumps(float(v) if type(v) in (int, float) else v) for v in values if v is not None
        }

    assert {name: spelled(values) for name, values in told.items()} == {
        name: spelled(values) for name, values in real.items()
    }
    return set(told)


def check_steps(rows: Iterable[tuple[str, str]]) -> None:
    """The variant that a field needs, where it is one of SamplingParams."""
    for name, step in rows:
        assert step in ("plain", "rich"), f"{name}: {step}"
        if name in SAMPLES:
            asked: dict[str, Any] = {"max_tokens": 9, name: SAMPLES[name]}
            is_plain = RichParams.of(SamplingParams(**asked), 1).is_neutral
            assert step == ("plain" if is_plain else "rich"), name


def test_fields_of_the_other_endpoints(endpoints: Any) -> None:
    schemas: dict[str, Any] = body_schemas()
    told = {code(row[0]) for row in tables(endpoints, "Profile", 2)}
    assert told == schemas["ProfileRequest"]["properties"].keys()
    text = endpoints.text.split("\n## Tokens\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", text))
    fields = {"prompt", "tokens", "model", *CHAT_FIELDS}
    assert fields == named & {*fields, *schemas["ChatCompletionRequest"]["properties"]}
    assert fields == {
        *schemas["DetokenizeRequest"]["properties"],
        *(name for part in schemas["TokenizeRequest"]["anyOf"] for name in part["properties"]),
    }


def test_statuses_and_codes(endpoints: Any, root: Path) -> None:
    rows = [row for row in endpoints.rows("Errors") if len(row) == 3]
    told = {(int(status), name.strip("`")) for status, name, _ in rows}
    assert len(told) == len(rows)
    statuses = {status for one in OPERATIONS for status in one.statuses}
    # A wrong method, a body that is too large, and a failure can meet every path, and a key too.
    assert {status for status, _ in told} == statuses | {401, 405, 413, 500}
    assert {name for _, name in told if name} == codes(root)


def test_sections_of_the_report_page(pages: dict[str, Any], root: Path) -> None:
    rows = pages["docs/tuning.md"].rows("2. Read the report page")
    tree = ast.parse((root / "capture" / "report_sections.py").read_text(encoding="utf-8"))
    titles = {TITLE}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Section":
            titles |= {arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
    told = {row[0] for row in rows}
    # A section whose part of the profile is missing may have a shorter title.
    assert told <= titles and all(any(t.startswith(title) for t in told) for title in titles)


def test_attributes_of_spans(pages: dict[str, Any], root: Path) -> None:
    told = {code(row[0]) for row in tables(pages["docs/metrics.md"], "Spans", 2)}
    text = (root / "engine" / "server_tracing.py").read_text(encoding="utf-8")
    assert told == set(re.findall(r'"((?:gen_ai|error)\.[\w.]+)"', text))


def codes(root: Path) -> set[str]:
    """What the server's modules give as an error's code."""
    found = set()
    for path in (root / "engine").glob("server_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code":
                assert isinstance(node.value, ast.Constant), ast.unparse(node)
                found.add(node.value.value)
    return found
