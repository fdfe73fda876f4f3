"""YAML text to plain values that remember their line and column.

Owns the YAML rules of a deployment: the scalars of YAML 1.2's core schema, no duplicate keys, no
aliases, no tags. Does not know what the keys mean (configs/schema.py). Data flow: text -> PyYAML
nodes -> (plain tree, mark of each path), used by configs/load.py for files and for `--set`.

PyYAML's own loader follows YAML 1.1: it reads `no` as a boolean, `1e-3` as a string, `010` as 8
and `12:30` as 750, and it keeps the last of two equal keys in silence. Here:

    null    nothing, ~, null, Null, NULL
    bool    true, True, TRUE, false, False, FALSE, and no other word
    int     12, -3, 010 (decimal ten, as in YAML 1.2), 0o10 (octal), 0xff
    float   1.5, 1e-3, .5, 2., .inf, .nan
    str     all the rest (no, on, 1_000, 12:30), and whatever is quoted
"""

import re
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import yaml

from decodegrid.configs.value_text import show_key

NodePath: TypeAlias = tuple[str | int, ...]
Value: TypeAlias = bool | int | float | str | list["Value"] | dict[str, "Value"] | None

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
# int() of a longer text raises, and no field takes such a number.
_MAX_INT_DIGITS = 4000


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a YAML text, counted from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and where."""

    mark: Mark
    message: str


@dataclass(frozen=True, slots=True)
class Document:
    """One parsed text.

    `value` is the root, None for an empty text. `marks` maps a path such as ("cache", "block_size")
    or ("grid", "num_reqs", 1) to the start of its value, `key_marks` to the start of its key.
    With `problems`, `value` holds what could be read in spite of them.
    """

    value: Value
    marks: dict[NodePath, Mark] = field(default_factory=dict)
    key_marks: dict[NodePath, Mark] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


class _PlaceLike(Protocol):
    """PyYAML's mark, counted from 0; its Python and its C form are different classes."""

    @property
    def line(self) -> int: ...

    @property
    def column(self) -> int: ...


class _Unsupported(yaml.YAMLError):
    """Legal YAML that a deployment does not need, at the start of `event`."""

    def __init__(self, event: yaml.Event, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(_mark(event.start_mark), message)


class _Loader(yaml.SafeLoader):
    """Composes nodes; a plain scalar keeps the str tag and is resolved by `_scalar`."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _Unsupported(event, f"aliases are not supported, got *{event.anchor}")
        tag = getattr(event, "tag", None)  # the "!" of a quoted scalar says nothing
        if tag not in (None, "!"):
            raise _Unsupported(event, f"tags are not supported, got {tag}")
        return super().compose_node(parent, index)


def parse(text: str | bytes) -> Document:
    """Parse one YAML document. Never raises: what is wrong stands in `problems`."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None or _is_nothing(root):
            return Document(None)
        reader = _NodeReader()
        value = reader.read(root, ())
    except yaml.YAMLError as error:
        return Document(None, problems=(_syntax_problem(error),))
    except RecursionError:
        return Document(None, problems=(Problem(Mark(1, 1), "nested too deeply"),))
    return Document(value, reader.marks, reader.key_marks, tuple(reader.problems))


def _syntax_problem(error: yaml.YAMLError) -> Problem:
    """PyYAML's error of several lines as one line, at the place where it gave up."""
    if isinstance(error, _Unsupported):
        return error.problem
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        parts = [part for part in (error.context, error.problem) if part]
        return Problem(_mark(mark), ", ".join(parts))
    return Problem(Mark(1, 1), " ".join(str(error).split()))


class _NodeReader:
    """Walks composed nodes once, collecting marks and problems."""

    def __init__(self) -> None:
        self.marks: dict[NodePath, Mark] = {}
        self.key_marks: dict[NodePath, Mark] = {}
        self.problems: list[Problem] = []

    def read(self, node: yaml.Node, path: NodePath) -> Value:
        self.marks[path] = _mark(node.start_mark)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, i)) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: NodePath) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, "a key must be a plain word")
                continue
            key = key_node.value
            key_path = (*path, key)
            if key in found:
                first = self.key_marks[key_path].line
                name = show_key(key_path)
                self._problem(key_node, f"{name}: duplicate key, first set in line {first}")
                continue
            self.key_marks[key_path] = _mark(key_node.start_mark)
            found[key] = self.read(value_node, key_path)
        return found

    def _scalar(self, node: yaml.ScalarNode) -> Value:
        text: str = node.value
        if node.style is not None:  # quoted, or a block
            # An escape can write what no name of a file, host or model can hold.
            bad = _NO_TEXT.search(text)
            if bad is not None:
                self._problem(node, f"a text cannot hold the character U+{ord(bad[0]):04X}")
                return ""
            return text
        if _NULL.fullmatch(text):
            return None
        if _BOOL.fullmatch(text):
            return text.lower() == "true"
        if _INT.fullmatch(text):
            if len(text) > _MAX_INT_DIGITS:
                self._problem(node, f"a number of {len(text)} digits")
                return 0
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        if _FLOAT.fullmatch(text):
            return float(re.sub(r"\.(?=[in])", "", text.lower()))
        return text

    def _problem(self, node: yaml.Node, message: str) -> None:
        self.problems.append(Problem(_mark(node.start_mark), message))


def _mark(mark: _PlaceLike | None) -> Mark:
    return Mark(1, 1) if mark is None else Mark(mark.line + 1, mark.column + 1)


def _is_nothing(root: yaml.Node) -> bool:
    """A `---` with nothing behind it."""
    return isinstance(root, yaml.ScalarNode) and root.style is None and root.value == ""
