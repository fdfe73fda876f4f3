"""The library's front door: prompts in, outputs out.

Owns the parts of one deployment (tokenizer, runner, scheduler, loop, table of open requests). Holds
no model code. A call checks all its prompts, queues them, steps the engine until they have ended,
and takes back whatever is left when the caller stops early. One thread may use an LLM. close()
gives its memory back, at once and not when Python comes to it.
"""

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from decodegrid.configs.grammar_section import StructuredOutputsSection
from decodegrid.configs.load import LoadedConfig, load_config
from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine.admission import EngineLimits
from decodegrid.engine.collector_pause import collector_paused
from decodegrid.engine.engine_types import (
    LOOPS,
    SCHEDULERS,
    CompletionLoop,
    EngineType,
    PromptLoop,
)
from decodegrid.engine.grammar_compiler import GrammarCompiler
from decodegrid.engine.grammar_masks import GrammarMasks
from decodegrid.engine.grammar_queue import GrammarQueue
from decodegrid.engine.output_stream import OutputStream
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.request_output import RequestOutput, StreamOutput
from decodegrid.engine.runner_protocol import StepRunner
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.stats import EngineStats
from decodegrid.engine.step_watch import StepWatch, plain_watch
from decodegrid.engine.stream_table import Prompt, StreamTable
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.verify_policy import FixedVerify, VerifyPolicy

if TYPE_CHECKING:
    from decodegrid.engine.hand_over import HandOver


class LLM:
    """A model that is ready to decode; as a context manager it is closed at the end.

    After close(), generate, stream and abort raise RuntimeError; stats and report() still answer.
    """

    def __init__(self, config: str | Path | LoadedConfig | DeploymentConfig | None = None) -> None:
        """Load, compile and capture a deployment.

        config: a YAML file, a loaded or hand-made configuration (relative paths of a hand-made
        one start at the working directory), or None for the embedded model. Raises ConfigError
        for the file, ValueError or OSError for the checkpoint.
        """
        with collector_paused():
            self._start(_load(config))

    def _start(self, loaded: LoadedConfig) -> None:
        # Imported here: the scheduler, the tokenizer and the command line work without torch.
        from decodegrid.engine.build import build_runner
        from decodegrid.engine.deployment_check import check_before_start
        from decodegrid.engine.runner_watch import make_watch
        from decodegrid.engine.surface_run import make_policy

        tokenizer = check_before_start(loaded)
        runner = build_runner(loaded)
        self._set_up(
            runner,
            tokenizer,
            loaded.config.scheduler.decode_steps_per_prefill_chunk,
            make_policy(runner, loaded),
            make_watch(runner, loaded),
            async_scheduling=loaded.config.has_step_in_flight,
            structured_outputs=loaded.config.structured_outputs,
            engine_type=loaded.config.scheduler.engine_type,
        )

    @classmethod
    def from_runner(
        cls,
        runner: StepRunner,
        tokenizer: Tokenizer,
        *,
        decode_steps_per_prefill_chunk: int = 4,
        policy: VerifyPolicy | None = None,
        watch: StepWatch | None = None,
        async_scheduling: bool = False,
        structured_outputs: StructuredOutputsSection | None = None,
        engine_type: EngineType = "normal",
    ) -> "LLM":
        """An LLM around a runner that is ready; policy None verifies every draft, watch None
        writes no dumps, the others as in a deployment (None: its defaults)."""
        llm = cls.__new__(cls)
        policy = FixedVerify() if policy is None else policy
        watch = plain_watch(runner) if watch is None else watch
        llm._set_up(
            runner,
            tokenizer,
            decode_steps_per_prefill_chunk,
            policy,
            watch,
            async_scheduling=async_scheduling,
            structured_outputs=structured_outputs or StructuredOutputsSection(),
            engine_type=engine_type,
        )
        return llm

    def _set_up(
        self,
        runner: StepRunner,
        tokenizer: Tokenizer,
        decode_steps_per_prefill_chunk: int,
        policy: VerifyPolicy,
        watch: StepWatch,
        *,
        async_scheduling: bool,
        structured_outputs: StructuredOutputsSection,
        engine_type: EngineType,
    ) -> None:
        tokenizer.check_vocabulary(runner.vocab_size)
        self.tokenizer = tokenizer
        self.start_up_report = runner.start_up_report
        self.limits = EngineLimits.of(runner)
        self.stats = EngineStats(runner)
        self.engine_type = engine_type
        self.scheduler = SCHEDULERS[engine_type](
            self.limits,
            decode_steps_per_prefill_chunk=decode_steps_per_prefill_chunk,
            policy=policy,
        )
        self._watch = watch
        grammars = GrammarCompiler(
            tokenizer.token_bytes, runner.vocab_size, tokenizer.eos_token_id, structured_outputs,
            tokenizer.mark_bytes,
        )  # fmt: skip
        loop = LOOPS[engine_type](
            runner,
            self.scheduler,
            self.stats,
            watch,
            async_scheduling=async_scheduling,
            masks=GrammarMasks(runner.num_draft_tokens, runner.vocab_size),
            grammars=GrammarQueue(grammars),
        )
        self.stream_table = StreamTable(loop, tokenizer, self.limits, grammars)
        """The open requests; what generate and stream are made of."""

    def __enter__(self) -> Self:
        _ = self.stream_table.loop  # raises where it is closed
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free weights, state and captured graphs; may be called again.

        Open requests end with finish reason "abort": their streams still give the pieces that were
        not taken, and that last one.
        """
        if self.stream_table.is_closed:
            return
        try:
            self.stream_table.close()
        finally:
            self._watch.close()
            self.stats.let_go()
            gc.collect()  # steps, buffers and compiled regions refer to each other in circles

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Decode prompts to their ends; results in the order of the prompts.

        prompts: a text, a list of texts, or a list of lists of token ids. sampling_params: one for
        all or one a prompt. Raises RequestError, before anything runs, if any of them is bad.
        """
        self.require_whole("generate")
        return self._run(self._build_streams(prompts, sampling_params))

    def prefill(self, prompts: Prompt | Sequence[Prompt]) -> "list[HandOver]":
        """Compute prompts and export their states, in their order; a prompt engine's only work.

        Raises RequestError as generate does, and for an engine of another type.
        """
        from decodegrid.engine.hand_over import exporter

        loop = self.stream_table.loop
        if not isinstance(loop, PromptLoop):
            raise RequestError(
                f"prefill() needs scheduler.engine_type prompt, this engine is {self.engine_type}"
            )
        streams = self._build_streams(prompts, SamplingParams(max_tokens=1))
        return loop.prefill([stream.requests[0] for stream in streams], exporter(loop.runner))

    def resume(
        self,
        hand_overs: "Sequence[HandOver]",
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Decode behind prompts that a prompt engine computed; a completion engine's only work.

        sampling_params: as for generate, without prompt logprobs. Raises HandOverError for a state
        that this engine cannot take, RequestError for the rest; nothing has run then.
        """
        from decodegrid.engine.hand_over import importer

        loop = self.stream_table.loop
        if not isinstance(loop, CompletionLoop):
            raise RequestError(
                f"resume() needs scheduler.engine_type completion, this engine is "
                f"{self.engine_type}"
            )
        loads = [importer(loop.runner, hand_over) for hand_over in hand_overs]
        prompts = [hand_over.prompt_token_ids for hand_over in hand_overs]
        streams = self._build_streams(prompts, sampling_params)
        requests = [request for stream in streams for request in stream.requests]
        if any(request.prompt_logprobs is not None for request in requests):
            raise RequestError("prompt_logprobs need the engine that computed the prompt")
        for stream, load in zip(streams, loads, strict=True):
            for request in stream.requests:
                loop.expect(request, load)
        try:
            return self._run(streams)
        finally:
            loop.forget(requests)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamOutput]:
        """Decode prompts and give each step's new text as it comes, prompts interleaved.

        Arguments and errors as for generate; errors are raised here, not at the first piece. The
        requests are queued when the first piece is asked for. Closing the iterator ends them.
        """
        self.require_whole("stream")
        return self.stream_table.run(self._build_streams(prompts, sampling_params))

    def require_whole(self, what: str) -> None:
        """Raise RequestError unless this engine both prefills and decodes."""
        if self.engine_type != "normal":
            raise RequestError(
                f"{what} needs scheduler.engine_type normal, this engine is {self.engine_type}"
            )

    def report(self) -> str:
        """What was done so far and how the verify budget stands, one fact a line."""
        prefix = self.scheduler.prefix
        cached = [] if prefix is None else [prefix.report()]
        return "\n".join([*self.scheduler.policy.status(), self.stats.report(), *cached])

    def abort(self, request_id: str) -> bool:
        """End an open request now with finish reason "abort"; False when none has that id."""
        return self.stream_table.abort(request_id) is not None

    def _run(self, streams: list[OutputStream]) -> list[RequestOutput]:
        """Decode built requests to their ends."""
        self.stream_table.open(streams)
        try:
            while not all(stream.is_finished for stream in streams):
                self.stream_table.step()
        finally:
            self.stream_table.discard(streams)
        return [stream.output() for stream in streams]

    def _build_streams(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[OutputStream]:
        """Check everything and build the requests; nothing is queued."""
        _ = self.stream_table.loop  # raises where it is closed
        texts_or_ids = _as_prompt_list(prompts)
        params_list = _as_params_list(sampling_params, len(texts_or_ids))
        streams = []
        for index, (prompt, params) in enumerate(zip(texts_or_ids, params_list, strict=True)):
            try:
                streams.append(self.stream_table.build(prompt, params, index=index))
            except RequestError as error:
                where = f"prompt {index}: " if len(texts_or_ids) > 1 else ""
                raise RequestError(f"{where}{error}") from error
        return streams


def _as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be a text or a list of prompts, got {prompts!r}")
    found: list[Prompt] = []
    for index, prompt in enumerate(prompts):
        # Callers without a type checker pass a flat list of ids, or bytes.
        if isinstance(prompt, (int, bytes)) or not isinstance(prompt, Sequence):
            raise RequestError(
                f"prompt {index} must be a text or a list of token ids, got {prompt!r}; "
                "a single prompt of token ids is given as [[...]]"
            )
        found.append(prompt)
    return found


def _as_params_list(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if sampling_params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    wrong = not isinstance(sampling_params, Sequence) or any(
        not isinstance(params, SamplingParams) for params in sampling_params
    )
    if wrong:
        raise RequestError(
            "sampling_params must be SamplingParams, or a list of one for each prompt, "
            f"got {sampling_params!r}"
        )
    if len(sampling_params) != num_prompts:
        raise RequestError(f"{len(sampling_params)} sampling parameters for {num_prompts} prompts")
    return list(sampling_params)


def _load(config: str | Path | LoadedConfig | DeploymentConfig | None) -> LoadedConfig:
    if isinstance(config, LoadedConfig):
        return config
    if isinstance(config, DeploymentConfig):
        origins = dict.fromkeys(_dotted_keys(config.model_dump()), "caller")
        return LoadedConfig(config=config, origins=origins, path=Path.cwd() / "caller.yaml")
    return load_config(None if config is None else Path(config))


def _dotted_keys(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _dotted_keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key
