"""The pages against the embedded model, served by a process of its own as the quick start says."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytestmark = pytest.mark.slow
WAIT_S = 900
"""A first start compiles."""


class Served:
    """As much of a server of the tests as pages need."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> tuple[int, str]:
        found = httpx2.get(self.url + path, timeout=60)
        return found.status_code, found.text

    def post(self, path: str, body: Any) -> httpx2.Response:
        return httpx2.post(self.url + path, json=body, timeout=300)


@pytest.fixture(scope="module")
def embedded(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    command = [sys.executable, "-m", "decodegrid", "serve", "--port", "0"]
    command += ["--set", f"server.profile_dir={folder / 'traces'}"]
    log = folder / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, cwd=root, stderr=stream, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        for _ in range(WAIT_S):
            time.sleep(1)
            assert process.poll() is None, log.read_text()
            ready = re.search(r'"ready: (http://[^"]+)"', log.read_text())
            if ready:
                yield Served(ready[1])
                break
        else:
            raise AssertionError(f"not ready: {log.read_text()}")
    finally:
        process.terminate()
        status = process.wait(120)
    assert status == 0, log.read_text()


@pytest.mark.parametrize("name", ["docs/quickstart.md", "docs/endpoints.md"])
def test_requests_of_a_page(
    name: str, pages: dict[str, Any], embedded: Served, root: Path, page_run: Any
) -> None:
    """What asks a server; what makes an engine in this process is left to the toy."""
    run = page_run.PageRun(root, embedded, None)
    for block in pages[name].blocks:
        is_asking = block.language in ("bash", "json") or "LLM" not in block.text
        if is_asking and block.words != ("log",):
            run.run(block)
    assert run.num_run >= 5


def test_metrics(embedded: Served, pages: dict[str, Any]) -> None:
    """Those of the page are those of a whole engine, its budget among them."""
    text = embedded.get("/metrics")[1]
    real = {name for name in re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)}
    table = r"^\| `([\w:]+)` \| (?:histogram|counter|gauge) \|"
    told = set(re.findall(table, pages["docs/metrics.md"].text, re.MULTILINE))
    assert told == {name for name in real if not name.endswith("_created")}
