"""The `server` section of a deployment: where it listens, what it accepts, and how it ends.

Owns the names, bounds and defaults of its fields. API keys stand in a file of their own and never
here. Reads no file and no environment.
"""

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from decodegrid.configs.byte_size import NumBytes
from decodegrid.configs.cross_field import CrossFieldError
from decodegrid.configs.sections import Section


class ServerSection(Section):
    """`decodegrid serve`."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 lets the system choose one, which the log names."""

    model_name: str = ""
    """Name of the model in the API; empty for the name of the checkpoint's directory."""

    max_queued_requests: Annotated[int, Field(ge=1, le=2**20)] = 256
    """Requests that may wait beside the scheduler.max_num_reqs that run, up to 1048576. Each of n
    completions counts; what comes on top gets 429."""

    max_queued_tokens: Annotated[int, Field(ge=1, le=2**40)] = 2**20
    """Prompt tokens of the requests that have no first token yet; what comes on top gets 429. A
    request that finds none waiting is taken whatever its length."""

    max_body_bytes: Annotated[NumBytes, Field(ge=1024, le=2**31)] = 4 * 2**20
    """Largest body of a request, 1 KiB to 2 GiB; a larger one gets 413 and is not read."""

    request_timeout_s: Annotated[float, Field(ge=0.0, le=86400.0)] = 600.0
    """Seconds after which a request is ended, waiting included, up to 86400; 0 for never."""

    send_timeout_s: Annotated[float, Field(ge=0.0, le=86400.0)] = 30.0
    """Seconds after which a client that takes nothing of the answer that waits for it is cut off,
    up to 86400; 0 for never."""

    drain_timeout_s: Annotated[float, Field(ge=0.0, le=86400.0)] = 30.0
    """Seconds that open requests get to end after SIGTERM, up to 86400."""

    stall_s: Annotated[float, Field(gt=0.0, le=86400.0)] = 60.0
    """Seconds of one step after which /ready says that the engine hangs, up to 86400."""

    stall_exit_s: Annotated[float, Field(ge=0.0, le=86400.0)] = 300.0
    """Seconds of one step after which the process ends itself; from stall_s, 0 for never."""

    api_keys_file: str = ""
    """File of API keys, one a line, relative to the YAML file; empty: no key is asked for."""

    profile_dir: str = ""
    """Directory for the traces of POST /profile, relative to the YAML file; empty: it is off."""

    otel_endpoint: str = ""
    """URL that spans are sent to as OTLP over HTTP, http://localhost:4318 for one; without a path
    /v1/traces is meant. Needs the extra `otel`; empty: none are made."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of the log's lines."""

    @field_validator("otel_endpoint")
    @classmethod
    def _is_url(cls, text: str) -> str:
        try:
            parts = urlsplit(text)
            has_host = bool(parts.hostname) and parts.username is None and parts.port != 0
            is_url = has_host and parts.scheme in ("http", "https")
        except ValueError:  # of the host or the port
            is_url = False
        if text and not is_url:
            raise ValueError("must be empty or a URL of http or https, without a user in it")
        return text

    @model_validator(mode="after")
    def _exit_behind_stall(self) -> Self:
        if 0 < self.stall_exit_s < self.stall_s:
            message = f"must be 0 (never) or at least server.stall_s = {self.stall_s:g}"
            raise CrossFieldError((("stall_exit_s", f"{message}, got {self.stall_exit_s:g}"),))
        return self
