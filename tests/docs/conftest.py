"""The pages of the documentation, cut into blocks, and a server for what they show.

Owns how a page is read and which tests get which blocks: a test with an argument `page` runs for
each page, one with `yaml_block`, `json_block` or `promql_block` for each block of that language.
The server has the toy model of the engine's tests behind it, with a schedule, so that it counts
all that a deployment counts.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from decodegrid.capture.budget import VerifyBudget
from decodegrid.capture.grid import build_grid
from decodegrid.capture.surface import Surface, SurfacePoint
from decodegrid.configs.load import load_config
from decodegrid.engine.llm import LLM
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.verify_policy import ScheduledVerify

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FENCE = "```"
SHELLS = ("bash", "sh", "console")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    place: str
    """Page and line, for messages."""
    language: str
    words: tuple[str, ...]
    """Behind the language."""
    text: str


@dataclass(frozen=True)
class Page:
    """A page of the documentation."""

    path: Path
    text: str
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def prose(self) -> str:
        """The page without its blocks."""
        lines, is_inside = [], False
        for line in self.text.splitlines():
            if line.lstrip().startswith(FENCE):
                is_inside = not is_inside
            elif not is_inside:
                lines.append(line)
        return "\n".join(lines)

    def rows(self, heading: str) -> list[list[str]]:
        """Cells of the tables under a heading, up to the next one, without the tables' heads."""
        lines = self.prose.splitlines()
        starts = [i for i, line in enumerate(lines) if line.strip("# ") == heading and "#" in line]
        assert len(starts) == 1, f"{self.name}: {len(starts)} headings {heading!r}"
        found: list[list[str]] = []
        for before, line in zip(lines[starts[0] :], lines[starts[0] + 1 :], strict=False):
            if line.startswith("#"):
                break
            if not line.startswith("|") or line.startswith("|---"):
                continue
            if before.startswith("|"):
                bare = line.strip().removeprefix("|").removesuffix("|")
                found.append([cell.strip() for cell in bare.split("|")])
        return found


def read_page(path: Path) -> Page:
    """A page; raises AssertionError for a block that does not end."""
    text = path.read_text(encoding="utf-8")
    blocks: list[Block] = []
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        bare = line.strip()
        if not bare.startswith(FENCE):
            continue
        language, *words = bare.removeprefix(FENCE).split() or [""]
        inner: list[str] = []
        place = f"{path.relative_to(ROOT)}:{number}"
        for _, next_line in lines:
            if next_line.strip() == FENCE:
                break
            inner.append(next_line)
        else:
            raise AssertionError(f"{place}: the block does not end")
        blocks.append(Block(place, language, tuple(words), "\n".join(inner) + "\n"))
    return Page(path, text, tuple(blocks))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """See the module."""
    pages = [read_page(path) for path in PAGES]
    if "page" in metafunc.fixturenames:
        metafunc.parametrize("page", pages, ids=[page.name for page in pages])
    for language in ("yaml", "json", "promql"):
        name = f"{language}_block"
        if name in metafunc.fixturenames:
            blocks = [b for page in pages for b in page.blocks if b.language == language]
            metafunc.parametrize(name, blocks, ids=[block.place for block in blocks])


@pytest.fixture(scope="session")
def pages() -> dict[str, Page]:
    """By their paths in the repository."""
    return {page.name: page for page in map(read_page, PAGES)}


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


def _module(path: str) -> ModuleType:
    """A module of the tests by its file: other folders lend their toy model and servers."""
    name = f"decodegrid_docs_{path.replace('/', '_')}"
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / f"{path}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_TOY, _SERVERS = _module("engine/conftest"), _module("engine/serve/conftest")
_RUN = _module("docs/page_run")
tokenizer = _TOY.tokenizer


@pytest.fixture(scope="session")
def make_toy(tokenizer: Tokenizer) -> Callable[[], LLM]:
    """make_toy(): an engine as large as the default deployment, and as fast as it has work."""

    def make() -> LLM:
        config = load_config(None).config
        grid = build_grid(config.scheduler.max_num_reqs, config.speculation.num_draft_tokens)
        runner = _TOY.FakeRunner(
            max_num_reqs=config.scheduler.max_num_reqs,
            max_model_len=config.scheduler.max_model_len,
            block_size=config.cache.block_size,
            prefill_chunk_sizes=tuple(config.scheduler.prefill_chunk_sizes),
            drafts="random",
        )
        times = {key: SurfacePoint(*[1 + key.num_query_tokens / 50] * 3, 3) for key in grid.keys}
        surface = Surface(times, config.surface.context_len, 1.0, {})
        runner.grid = grid
        budget = VerifyBudget(grid, surface, grid.num_draft_tokens)
        policy = ScheduledVerify(budget, grid.max_num_reqs + 1, note="made up")
        return LLM.from_runner(runner, tokenizer, policy=policy)

    return make


@pytest.fixture(scope="session")
def server(make_toy: Callable[[], LLM], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of the default deployment, which takes traces."""
    traces = tmp_path_factory.mktemp("traces")
    running = _SERVERS.RunningServer(make_toy, [f"server.profile_dir={traces}"])
    try:
        yield running.wait_ready()
    finally:
        running.kill()


@pytest.fixture
def sandbox(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that pages are run in: what they name of the repository, and a config.json."""
    for name in ("configs", "docs", "tests", "benchmarks"):
        (tmp_path / name).symlink_to(root / name)
    released = json.loads((root / "tests" / "released_config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(released))
    # The cut-down model that configs/h200.yaml describes.
    released["text_config"] |= {
        "n_routed_experts": 64,
        "engram_vocab_size": 2000000,
        "engram_num_embeddings": [48004402, 48011386],
    }
    (tmp_path / "v41-cut").mkdir()
    (tmp_path / "v41-cut" / "config.json").write_text(json.dumps(released))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DECODEGRID_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return tmp_path


@pytest.fixture
def run_of(root: Path, server: Any, make_toy: Callable[[], Any], sandbox: Path) -> Any:
    return _RUN.PageRun(root, server, make_toy)


@pytest.fixture(scope="session")
def page_run() -> ModuleType:
    """What runs pages."""
    return _RUN


@pytest.fixture
def page_of(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Page]:
    """page_of(text): a page of its own."""

    def make(text: str) -> Page:
        path = tmp_path / "page.md"
        path.write_text(text)
        monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
        return read_page(path)

    return make


@pytest.fixture(scope="session")
def metrics(server: Any) -> dict[str, set[str]]:
    """Labels of each series of /metrics, once everything has been counted."""
    body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True}
    for _ in range(3):
        assert server.post("/v1/completions", body).status_code == 200
    assert server.post("/v1/completions", {"nonsense": 1}).status_code == 400
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.get("/metrics")[1]):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found
