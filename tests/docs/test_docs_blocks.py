"""Single blocks and links: YAML is what it is said to be, queries ask for what is there.

What has to run is in test_docs_run.py; here every language is accounted for.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from decodegrid.configs.load import ConfigError, load_config
from decodegrid.configs.server_section import ServerSection

LANGUAGES = ("bash", "console", "json", "promql", "python", "sh", "yaml")
FUNCTIONS = ("abs", "histogram_quantile", "increase", "rate", "sum")
WORDS = ("by", "for", "on", "without")
SUFFIXES = ("_bucket", "_sum", "_count")


def load_yaml(block: Any, folder: Path) -> None:
    """Load a block as a deployment; of a fragment, under its section."""
    text = block.text
    if block.words:
        kind, section = block.words
        assert kind == "fragment", f"{block.place}: yaml {kind}"
        text = f"{section}:\n" + "".join(f"  {line}\n" for line in text.splitlines())
    path = folder / "deployment.yaml"
    path.write_text(text, encoding="utf-8")
    loaded = load_config(path)
    assert any(origin != "default" for origin in loaded.origins.values())


def test_yaml(yaml_block: Any, tmp_path: Path, metrics: dict[str, Any]) -> None:
    match yaml_block.words:
        case ("rules",):
            for group in yaml.safe_load(yaml_block.text)["groups"]:
                for rule in group["rules"]:
                    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
                    check_query(rule["expr"], metrics)
        case ("scrape",):
            (job,) = yaml.safe_load(yaml_block.text)["scrape_configs"]
            (target,) = job["static_configs"][0]["targets"]
            default = ServerSection()
            assert (job["metrics_path"], target) == ("/metrics", f"{default.host}:{default.port}")
        case _:
            load_yaml(yaml_block, tmp_path)


def test_promql(promql_block: Any, metrics: dict[str, Any]) -> None:
    check_query(promql_block.text, metrics)


def check_query(text: str, metrics: dict[str, Any]) -> None:
    """Raise AssertionError for a query of a series or a label that /metrics does not have, and for
    words that are neither. metrics: names of series and their labels."""
    bare = re.sub(r'"[^"]*"', '""', text)
    for left, right in ("()", "{}", "[]"):
        assert bare.count(left) == bare.count(right) > 0 or left not in bare + right, text
    bare = re.sub(r"\[\d+[smh]\]", "", bare)
    used = [name for name in re.findall(r"[a-zA-Z_:][\w:]*", bare) if name not in WORDS]
    series = [name for name in used if name not in FUNCTIONS]
    known = [name for name in series if name in metrics]
    assert known, f"no metric in {text}"
    labels = set.union(*(set(metrics[name]) for name in known))
    assert set(series) - set(known) <= labels, f"{set(series) - set(known) - labels} in {text}"


def test_wrong_blocks_are_found(tmp_path: Path, page_of: Any) -> None:
    metrics = {"x_total": {"model_name", "status"}}
    check_query('sum by (status) (rate(x_total{model_name="a"}[5m]))', metrics)
    for query in (
        "rate(y_total[5m])",
        "sum by (path) (x_total)",
        "rate(x_total[5m]",
        "avg(x_total)",
    ):
        with pytest.raises(AssertionError):
            check_query(query, metrics)
    load_yaml(page_of("```yaml fragment server\nport: 1\n```").blocks[0], tmp_path)
    for text in ("```yaml\nserver: {prot: 1}\n```", "```yaml fragment server\nprot: 1\n```"):
        with pytest.raises(ConfigError):
            load_yaml(page_of(text).blocks[0], tmp_path)
    with pytest.raises(AssertionError, match="does not end"):
        page_of("```yaml\n")


def test_every_language_is_one_that_is_checked(page: Any) -> None:
    for block in page.blocks:
        if block.language in ("", "text"):
            assert is_drawing(block.text), f"{block.place}: nothing checks this block"
        else:
            assert block.language in LANGUAGES, f"{block.place}: {block.language}"
        if block.language == "json":
            json.loads(block.text)


def is_drawing(text: str) -> bool:
    lines = text.splitlines()
    return sum("|" in line or "+--" in line for line in lines) > len(lines) / 2


@cache
def anchors(path: Path) -> frozenset[str]:
    """Of the headings of a page, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads)


def test_links_resolve(page: Any) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.prose):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        assert path.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {target}"


def test_every_page_is_in_the_index(pages: dict[str, Any]) -> None:
    linked = set(re.findall(r"\]\((\w+\.md)\)", pages["docs/README.md"].prose))
    there = {name.removeprefix("docs/") for name in pages if name.startswith("docs/")}
    assert linked == there - {"README.md"}


def test_what_is_named_in_the_text_exists(page: Any, metrics: dict[str, Any]) -> None:
    """Keys of the deployment and metrics that stand in backquotes."""
    keys = {key for key in load_config(None).origins}
    sections = {key.split(".")[0] for key in keys if "." in key}
    bases = {name.removesuffix(end) for name in metrics for end in ("", "_total", *SUFFIXES)}
    for code in re.findall(r"`([^`\n]+)`", page.prose):
        if re.fullmatch(r"[a-z_]+\.[a-z_.]+", code) and code.split(".")[0] in sections:
            is_known = code in keys or any(key.startswith(f"{code}.") for key in keys)
            assert is_known or (page.path.parent / code).exists(), f"{page.name}: {code}"
        if re.fullmatch(r"(vllm:|decodegrid_|process_)\w+", code):
            assert code in bases or code == "decodegrid_", f"{page.name}: {code}"
