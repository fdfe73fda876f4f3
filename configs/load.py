"""Loading a deployment: defaults < YAML file < `--set`, with the origin of every value.

Owns the order of the three sources, the error lines and the meaning of relative paths; does not
own the YAML rules (configs/yaml_nodes.py) or the bounds (configs/schema.py). Data flow: file and
overrides -> one plain tree with a place for each path -> schema -> LoadedConfig, or one
ConfigError with a line for everything that is wrong.
"""

import codecs
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

from decodegrid.configs.cross_field import CrossFieldError
from decodegrid.configs.env import default_cache_dir
from decodegrid.configs.other_names import say_instead
from decodegrid.configs.schema import SCHEMA_VERSION, DeploymentConfig
from decodegrid.configs.value_text import show_key, show_set, show_value
from decodegrid.configs.yaml_nodes import Document, NodePath, Value, parse

CONFIGS_DIR = Path(__file__).resolve().parent
EMBEDDED_CHECKPOINT = "tiny"
EMBEDDED_CHECKPOINTS = (EMBEDDED_CHECKPOINT, "tiny-v41")
"""Names that mean a checkpoint in this directory: the embedded model, and its quantised form."""
FROM_DEFAULT = "default"
FROM_SET = "--set"

# pydantic's words for these name Python's types, which a YAML file does not have.
_MESSAGES = MappingProxyType(
    {
        "bool_type": "must be true or false",
        "finite_number": "must be a finite number",
        "float_type": "must be a number",
        "int_type": "must be a whole number",
        "model_type": "must be a mapping",
        "string_too_short": "must not be empty",
        "string_type": "must be text",
        "too_short": "must have at least one entry",
        "tuple_type": "must be a list",
    }
)

# UTF-32 first: its little-endian mark begins with that of UTF-16.
_OTHER_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


class ConfigError(ValueError):
    """A deployment that cannot be used. `errors` has one line for each thing that is wrong."""

    def __init__(self, errors: Sequence[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = tuple(errors)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A checked deployment and where it came from.

    `origins` has every dotted key of the schema: "default", "file.yaml:LINE" or "--set". `path`
    is the absolute path of the YAML file.
    """

    config: DeploymentConfig
    origins: Mapping[str, str]
    path: Path

    @property
    def checkpoint_dir(self) -> Path:
        """Directory of the checkpoint, absolute; "tiny" and "tiny-v41" are the embedded ones."""
        if self.config.model.checkpoint in EMBEDDED_CHECKPOINTS:
            return CONFIGS_DIR / self.config.model.checkpoint
        return self._resolve("model.checkpoint", self.config.model.checkpoint)

    @property
    def cache_dir(self) -> Path:
        """Directory of the compile caches, absolute; not created here.

        Raises ValueError where the per-user directory is asked for and the environment names a
        relative one.
        """
        if not self.config.compile.cache_dir:
            return default_cache_dir()
        return self._resolve("compile.cache_dir", self.config.compile.cache_dir)

    @property
    def package_dir(self) -> Path | None:
        """Directory of the package to start from, absolute; None where none is named."""
        if not self.config.compile.package:
            return None
        return self._resolve("compile.package", self.config.compile.package)

    @property
    def cubins_dir(self) -> Path:
        """Directory of CUDA kernels, absolute; need not be there where no file names it. Raises
        ValueError as cache_dir does."""
        if not self.config.compile.cubins_dir:
            return self.cache_dir / "cubins"
        return self._resolve("compile.cubins_dir", self.config.compile.cubins_dir)

    @property
    def dump_dir(self) -> Path:
        """Directory of dumps, absolute; not created here. Raises ValueError as cache_dir does."""
        if not self.config.dumps.directory:
            return self.cache_dir / "dumps"
        return self._resolve("dumps.directory", self.config.dumps.directory)

    @property
    def api_keys_path(self) -> Path | None:
        """File of the server's API keys, absolute; None where none is named."""
        name = self.config.server.api_keys_file
        return self._resolve("server.api_keys_file", name) if name else None

    @property
    def profile_dir(self) -> Path | None:
        """Directory of the server's traces, absolute; not created here. None where none is
        named."""
        name = self.config.server.profile_dir
        return self._resolve("server.profile_dir", name) if name else None

    def values(self) -> Iterator[tuple[str, object]]:
        """(dotted key, value) of every field, in the schema's order."""
        yield from _leaves(self.config)

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """(dotted key, value as YAML text, origin) for every field, in the schema's order."""
        for key, value in self.values():
            yield key, show_value(value), self.origins[key]

    def _resolve(self, key: str, text: str) -> Path:
        """A path of the file is relative to the file, one of the command line to where it ran."""
        base = Path.cwd() if self.origins[key] == FROM_SET else self.path.parent
        # Not pathlib's forms: they raise for a user or a circle of links that leads nowhere, which
        # whoever opens the path reports with its name.
        return Path(os.path.realpath(base / os.path.expanduser(text)))


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Load and check one deployment.

    path: a YAML file; None for the embedded `configs/tiny.yaml`. An empty file means all defaults.
    overrides: `section.key=value` texts, the value by the scalar rules of the file (a list as
    `[1, 2]`); for a key that is given twice, the later one counts.

    Raises ConfigError, with all that is wrong as `file:line:column: section.key: what` lines, for
    a missing or unreadable file, one that is not UTF-8, YAML syntax, a duplicate or unknown key, a
    wrong type, a value out of range, or fields that contradict each other.
    """
    path = CONFIGS_DIR / "tiny.yaml" if path is None else Path(path)
    tree = _Tree(path)
    tree.read_file()
    for text in overrides:
        tree.override(text)
    return tree.check()


class _Tree:
    """The values of all sources in one plain tree, with the errors met on the way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.document = Document(None)
        self.values: dict[str, Any] = {}
        self.set_texts: dict[NodePath, str] = {}
        self.errors: list[str] = []

    def read_file(self) -> None:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise ConfigError([f"{self.path}: cannot read: {error.strerror}"]) from None
        self.document = parse(_decode(self.path, data))
        for problem in self.document.problems:
            place = f"{self.path}:{problem.mark.line}:{problem.mark.column}"
            self.errors.append(f"{place}: {problem.message}")
        root = self.document.value
        if isinstance(root, dict):
            self.values = root
        elif root is not None or () in self.document.marks:
            # A text that says `null` or 5 is a mistake; a text with comments only is not.
            shown = show_value(root)
            self.errors.append(f"{self._place(())}: must be a mapping of sections, got {shown}")

    def override(self, text: str) -> None:
        """Put one `a.b=c` on top of the file's values."""
        key, equals, value_text = text.partition("=")
        where = f"{FROM_SET} {show_set(text)}"
        if not equals or not key:
            self.errors.append(f"{where}: must be section.key=value")
            return
        path = tuple(key.split("."))
        problem = _unknown_key(path)
        if problem is not None:
            self.errors.append(f"{where}: {problem}")
            return
        document = parse(value_text)
        if document.problems:
            self.errors += [f"{where}: {problem.message}" for problem in document.problems]
            return
        self.set_texts[path] = text
        self._put(path, document.value)

    def _put(self, path: NodePath, value: Value) -> None:
        node = self.values
        for part in path[:-1]:
            node = node.setdefault(str(part), {})
            if not isinstance(node, dict):
                return  # the schema reports the section that is no mapping
        node[str(path[-1])] = value

    def check(self) -> LoadedConfig:
        version = self.values.get("schema_version")
        if type(version) is int and version > SCHEMA_VERSION:
            # Nothing else is said: what looks wrong may be right in that version.
            self.values, self.errors = {"schema_version": version}, []
        config = None
        try:
            config = DeploymentConfig.model_validate(self.values)
        except ValidationError as error:
            for details in error.errors(include_url=False):
                self.errors += self._describe(details)
        if self.errors or config is None:
            raise ConfigError(self.errors)
        origins = {key: self._origin(tuple(key.split("."))) for key, _ in _leaves(config)}
        return LoadedConfig(config, MappingProxyType(origins), self.path.resolve())

    def _describe(self, details: Any) -> list[str]:
        """The lines for one of pydantic's errors; none where the value was not even readable."""
        path: NodePath = details["loc"]
        problem_marks = {problem.mark for problem in self.document.problems}
        if self.document.marks.get(path) in problem_marks and path not in self.set_texts:
            return []
        given = details["input"]
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, CrossFieldError):
            places = [((*path, *key.split(".")), message) for key, message in cause.problems]
            return [f"{self._place(at)}: {show_key(at)}: {message}" for at, message in places]
        if details["type"] == "extra_forbidden":
            return [f"{self._place(path, at_key=True)}: {_unknown_key(path)}"]
        if isinstance(cause, ValueError):
            message = str(cause)
        else:
            plain = details["msg"].replace("Input should", "must")
            message = _MESSAGES.get(details["type"], plain)
        return [f"{self._place(path)}: {show_key(path)}: {message}, got {show_value(given)}"]

    def _place(self, path: NodePath, at_key: bool = False) -> str:
        """Where the value at `path`, or the closest thing around it, was given."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.set_texts:
                return f"{FROM_SET} {show_set(self.set_texts[path[:end]])}"
        key_marks, marks = self.document.key_marks, self.document.marks
        for end in range(len(path), -1, -1):
            mark = (key_marks if at_key and path[:end] in key_marks else marks).get(path[:end])
            if mark is not None and (end or not path):
                return f"{self.path}:{mark.line}:{mark.column}"
        return str(self.path)

    def _origin(self, path: NodePath) -> str:
        if path in self.set_texts:
            return FROM_SET
        mark = self.document.key_marks.get(path)
        return FROM_DEFAULT if mark is None else f"{self.path.name}:{mark.line}"


def _decode(path: Path, data: bytes) -> str:
    """The text of a file, which is UTF-8; a byte order mark of UTF-8 is dropped."""
    for mark, name in _OTHER_MARKS:
        if data.startswith(mark):
            raise ConfigError([f"{path}: is {name} text (byte order mark); save it as UTF-8"])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise ConfigError([f"{path}: not UTF-8 text ({byte}); save it as UTF-8"]) from None
    if "\0" in text:  # UTF-16 without a mark has one beside every ASCII character
        byte = f"byte {data.index(0)} is 0x00"
        raise ConfigError([f"{path}: not UTF-8 text ({byte}); save it as UTF-8"])
    return text


def _unknown_key(path: NodePath) -> str | None:
    """What is wrong with `path` as the name of a single setting, None if it is one."""
    model: type[BaseModel] | None = DeploymentConfig
    for i, part in enumerate(path):
        fields = model.model_fields if model is not None else {}
        if part not in fields:
            return f"{show_key(path[: i + 1])}: unknown key{_hint(path[: i + 1], list(fields))}"
        model = _section_type(fields[str(part)].annotation)
    if model is not None:
        return f"{show_key(path)}: a section; set one of its keys: {', '.join(model.model_fields)}"
    return None


def _hint(path: NodePath, fields: Sequence[str]) -> str:
    """What to write instead of the unknown key at the end of `path`; empty for no idea.

    fields: the keys that stand beside it.
    """
    name = str(path[-1])
    instead = say_instead(path)
    if instead is not None:
        return f"; {instead}"
    elsewhere = [key for key, _ in _leaves(DeploymentConfig()) if key.endswith(f".{name}")]
    if len(elsewhere) == 1:
        return f"; it is {elsewhere[0]}"
    close = difflib.get_close_matches(name, fields, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _section_type(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _leaves(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, value) of every field that is not a section."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
