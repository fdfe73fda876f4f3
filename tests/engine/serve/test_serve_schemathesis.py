"""The server against its own OpenAPI document, by schemathesis.

How many cases are tried, and whether anew in each run: DECODEGRID_FUZZ_EXAMPLES, see
tests/conftest.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import given
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from decodegrid.engine.llm import LLM
from decodegrid.engine.server_schema import OPERATIONS
from decodegrid.engine.tokenizer import Tokenizer

CHECKS: Any = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
CONFIG = {"seed": 1}
TRIED = [
    (found.path, found.method, mode)
    for found in OPERATIONS
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    # Without a body there is nothing that could be wrong.
    if mode is GenerationMode.POSITIVE or found.body is not None
]


@pytest.fixture(scope="module")
def engine_of() -> dict[str, LLM]:
    return {}


@pytest.fixture(scope="module")
def server(
    serve_shared: Any,
    make_runner: Callable[..., Any],
    tokenizer: Tokenizer,
    engine_of: dict[str, LLM],
) -> Any:
    """Small limits, so that whatever is accepted ends soon."""

    def make() -> LLM:
        engine_of["llm"] = LLM.from_runner(
            make_runner(max_model_len=200, drafts="mixed"), tokenizer
        )
        return engine_of["llm"]

    return serve_shared(
        make,
        "scheduler.max_model_len=200",
        "scheduler.max_num_reqs=4",
        "server.max_queued_requests=4",
        "sampling.max_tokens=6",
        "structured_outputs.compile_timeout_s=5",
    )


@pytest.fixture(scope="module")
def api(server: Any) -> Any:
    config = SchemathesisConfig.from_dict(CONFIG)
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=config)


@pytest.fixture(autouse=True)
def nothing_left(
    server: Any, engine_of: dict[str, LLM], idle: Callable[[LLM], bool]
) -> Iterator[None]:
    yield
    server.wait_until(lambda: idle(engine_of["llm"]) and not server.state.queue.open_ids)
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200


@pytest.mark.parametrize(("path", "method", "mode"), TRIED)
def test_the_server_does_what_its_document_says(
    api: Any, path: str, method: str, mode: GenerationMode
) -> None:
    """Data that the document allows, and data that it does not, for each operation."""
    operation = api[path][method.upper()]

    @given(operation.as_strategy(generation_mode=mode))
    def attempt(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=60)

    attempt()
