"""Deployments that nobody would write: the loader answers each with a config or with its own error.

How many are tried, and whether anew in each run: DECODEGRID_FUZZ_EXAMPLES, see conftest.py.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodegrid.configs.load import CONFIGS_DIR, ConfigError, LoadedConfig, load_config
from decodegrid.configs.schema import DeploymentConfig

TINY = (CONFIGS_DIR / "tiny.yaml").read_text(encoding="utf-8")
MANY = settings(max_examples=5 * settings().max_examples)
"""For small files; the embedded one takes a tenth of a second."""

NASTY = (
    "", "~", "null", "true", "no", "-1", "0", "1", "2", "0x10", "0o17", "010", "1e400", "-1e400",
    ".inf", "-.inf", ".nan", "9" * 5000, "1_000", "12:30", "2026-01-01", "[]", "[[]]", "[1, 2]",
    "{}", "{a: 1}", "'", '"', '"\\ud800"', '"\\x00"', "|", ">", "- 1", "&a 1", "*a", "!!int 1",
    "!x", "%YAML 1.1", "---", "...", "? a", ": :", "a: b: c", "@", "`", "\t", "#", "4MiB", "4 mib",
    "\u0085", "\u2028", "\ufeff", "\x07", "\x7f", "\U0001f600", "<<: {a: 1}", "=", "[" * 2000,
    "{a: " * 300, "\r", "\n", "auto", "inductor",
)  # fmt: skip


def try_load(path: Path, data: bytes) -> LoadedConfig | None:
    """The config of a file; None where it is refused as it should be."""
    path.write_bytes(data)
    try:
        return load_config(path)
    except ConfigError as error:
        assert error.errors
        for line in error.errors:
            # What is wrong with the whole file has no line.
            is_whole = re.match(r".*: (not UTF-8 text|is UTF-(16|32) text)", line)
            assert is_whole or re.match(rf"{re.escape(str(path))}:\d+:\d+: \S", line), line
            assert len(line.splitlines()) == 1 and len(line) < 2000, line
        return None


@st.composite
def changed_texts(draw: st.DrawFn) -> bytes:
    """The embedded deployment with a few cuts, copies and insertions."""
    text = TINY
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["value", "cut", "copy", "insert", "indent", "swap"]))
        lines = text.split("\n")
        at = draw(st.integers(0, len(lines) - 1))
        other = draw(st.integers(0, len(lines) - 1))
        if kind == "value":
            key, colon, _ = lines[at].partition(":")
            lines[at] = f"{key}{colon} {draw(st.sampled_from(NASTY))}"
        elif kind == "indent":
            lines[at] = draw(st.sampled_from(["", " ", "    ", "\t", "- "])) + lines[at].lstrip()
        elif kind == "swap":
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == "copy":
            lines.insert(other, lines[at])
        elif kind == "cut":
            del lines[min(at, other) : max(at, other)]
        else:
            place = draw(st.integers(0, len(lines[at])))
            word = draw(st.sampled_from(NASTY) | st.text(max_size=5))
            lines[at] = lines[at][:place] + word + lines[at][place:]
        text = "\n".join(lines)
    return text.encode("utf-8", errors="surrogatepass")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.yaml"


def test_changed_texts(path: Path) -> None:
    found = set()

    @given(changed_texts())
    def check(data: bytes) -> None:
        found.add(try_load(path, data) is not None)

    check()
    assert found == {True, False}, "the changes are too few, or too many"


def test_bytes(path: Path) -> None:
    @given(st.binary(max_size=40), st.integers(0, len(TINY)), st.integers(0, 40))
    def check(data: bytes, at: int, gone: int) -> None:
        try_load(path, data)
        # Of a part, which is read sooner.
        whole = TINY.encode()[max(0, at - 1000) : at + 1000]
        at = min(at, 1000)
        try_load(path, whole[:at] + data + whole[at + gone :])

    check()


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested dictionary by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {}
        if not isinstance(value, dict):
            found[prefix + key] = value
    return found


DEFAULTS = leaves(DeploymentConfig().model_dump())
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 20)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(sorted({str(value) for value in DEFAULTS.values()}))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A file that leaves all to the defaults."""
    found = tmp_path / "empty.yaml"
    found.write_bytes(b"")
    return found


def test_trees_of_known_keys(path: Path, empty: Path) -> None:
    """Every key with values of any type; YAML reads JSON as it is."""

    @MANY
    @given(
        st.dictionaries(st.sampled_from(sorted(DEFAULTS)), VALUES, max_size=4),
        st.dictionaries(st.text(max_size=6), VALUES, max_size=1),
    )
    def check(flat: dict[str, Any], unknown: dict[str, Any]) -> None:
        data = json.dumps({**nested(flat), **unknown}, ensure_ascii=False)
        loaded = try_load(path, data.encode("utf-8", errors="surrogatepass"))
        assert loaded is None or not unknown
        overrides = [f"{key}={json.dumps(value)}" for key, value in flat.items()]
        try:
            load_config(empty, overrides)
        except ConfigError as error:
            assert all(line.startswith("--set ") for line in error.errors)

    check()


TEXT_KEYS = [key for key, value in DEFAULTS.items() if isinstance(value, str)]


def test_what_show_prints_loads_as_the_same(path: Path, empty: Path) -> None:
    """The values of `config show`, given with --set and as a file."""
    accepted = 0

    def changes(key: str) -> st.SearchStrategy[Any]:
        default = DEFAULTS[key]
        if isinstance(default, bool):
            return st.booleans()
        if isinstance(default, int):
            return st.integers(0, 2**20) | st.sampled_from([default * 2, default + 2])
        if isinstance(default, float):
            return st.floats(0, 1e6) | st.integers(1, 100)
        return st.text(min_size=1, max_size=12)

    plain = {
        key: changes(key) for key, value in DEFAULTS.items() if isinstance(value, (int, float, str))
    }

    @MANY
    @given(st.data(), st.lists(st.sampled_from(sorted(plain)), max_size=3, unique=True))
    def check(data: st.DataObject, keys: list[str]) -> None:
        nonlocal accepted
        flat = {key: data.draw(plain[key]) for key in keys}
        text = json.dumps(nested(flat))
        loaded = try_load(path, text.encode())
        if loaded is None:
            return
        accepted += 1
        rows = {key: shown for key, shown, _ in loaded.rows()}
        dumped = leaves(loaded.config.model_dump())
        assert rows.keys() == dumped.keys()
        # A long value is cut where it is shown.
        whole = {
            key: json.dumps(dumped[key]) if shown.endswith("...") else shown
            for key, shown in rows.items()
        }
        again = load_config(empty, [f"{key}={shown}" for key, shown in whole.items()])
        assert again.config == loaded.config
        assert set(again.origins.values()) == {"--set"}
        lines = [f'"{key}": {shown}' for key, shown in nested_rows(whole)]
        reloaded = try_load(path, "\n".join(lines).encode())
        assert reloaded is not None and reloaded.config == loaded.config

    check()
    assert accepted > 5


def nested_rows(rows: dict[str, str]) -> list[tuple[str, str]]:
    """(section, "{key: value, ...}") of dotted keys, as a file in flow style has them."""
    tree = nested(dict(rows))

    def flow(node: Any) -> str:
        if not isinstance(node, dict):
            return str(node)
        return "{" + ", ".join(f'"{key}": {flow(value)}' for key, value in node.items()) + "}"

    return [(key, flow(value)) for key, value in tree.items()]
