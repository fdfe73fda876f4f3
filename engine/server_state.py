"""What the handlers of a server share.

Owns the parts of one server and the threads that read bodies. Data flow: a checked deployment ->
the parts; handlers ask it for the engine and have their work done beside the event loop.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from decodegrid.configs.load import LoadedConfig
from decodegrid.configs.strict_json import load_json
from decodegrid.engine.async_llm import AsyncLLM
from decodegrid.engine.body_fields import kind_name
from decodegrid.engine.server_errors import ApiError
from decodegrid.engine.server_health import Health
from decodegrid.engine.server_keys import ApiKeys
from decodegrid.engine.server_metrics import ServerMetrics
from decodegrid.engine.server_queue import RequestQueue
from decodegrid.engine.server_tracing import make_tracer

if TYPE_CHECKING:
    from decodegrid.engine.server_profile import Profiler

Json = Any
"""What json.loads makes."""

_Result = TypeVar("_Result")
_NUM_READERS = 4
_NUM_GRAMMAR_READERS = 8


class ServerState:
    """One server's parts; used from its event loop."""

    def __init__(self, loaded: LoadedConfig, keys: ApiKeys) -> None:
        """Raises ValueError where a part that is asked for is not installed."""
        self.config = loaded.config
        self.keys = keys
        server = self.config.server
        self.model_name = server.model_name or loaded.checkpoint_dir.name
        self.health = Health(server.stall_s)
        self.metrics = ServerMetrics(self.model_name, self.health)
        self.tracer = make_tracer(server.otel_endpoint)
        self.profile_dir = loaded.profile_dir
        self.queue = RequestQueue(
            self.config.scheduler.max_num_reqs,
            server.max_queued_requests,
            server.max_queued_tokens,
            self._is_running,
        )
        self.profiler: Profiler | None = None
        """Set with the routes."""
        self._readers = ThreadPoolExecutor(_NUM_READERS, "decodegrid-read")
        # Of their own: who waits for a grammar must not keep others from being read.
        self._grammar_readers = ThreadPoolExecutor(_NUM_GRAMMAR_READERS, "decodegrid-grammar")

    async def read(self, work: Callable[..., _Result], *args: Any) -> _Result:
        """Do what takes a while in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work, *args)

    async def check_grammar(self, engine: AsyncLLM, params: Any) -> None:
        """Raise RequestError where the form that params ask for is no grammar."""
        if params.structured_outputs is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._grammar_readers, engine.check_grammar, params)

    def check_model(self, name: Json) -> None:
        """Raise ApiError for the name of another model; none and an empty one mean this."""
        if name is None:
            return
        if not isinstance(name, str):
            raise ApiError(400, f"model must be a string, got {kind_name(name)}", param="model")
        if name not in ("", self.model_name):
            raise ApiError(
                404,
                f"the model {name!r} is not served here; {self.model_name!r} is",
                param="model",
                code="model_not_found",
            )

    def _is_running(self, request_id: str) -> bool:
        engine = self.health.engine
        return engine is not None and engine.is_open(request_id)

    def close(self) -> None:
        """End the threads, which wait for nothing but their work; may take a moment."""
        if self.profiler is not None:
            self.profiler.close()
        if self.tracer is not None:
            self.tracer.close()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._grammar_readers.shutdown(wait=False, cancel_futures=True)


def read_json(data: bytes) -> Json:
    """The JSON of a body; raises ApiError."""
    try:
        return load_json(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 at byte {error.start}") from None
    except ValueError as error:
        raise ApiError(400, f"the body is {error}", code="invalid_json") from None
