"""The open requests of an engine and the way of each step's tokens to them.

Owns which requests are open, their names, and the loop that serves them. Knows no threads: whoever
drives it (LLM in the caller's thread, AsyncLLM in its own) calls everything but build from one
thread. Data flow: build makes a stream from a prompt, open queues it, step runs the engine once and
fills the streams, discard forgets one.
"""

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count

from decodegrid.engine.admission import EngineLimits, build_request
from decodegrid.engine.engine_loop import EngineLoop
from decodegrid.engine.grammar_compiler import GrammarCompiler
from decodegrid.engine.grammar_params import GrammarSource
from decodegrid.engine.logprobs import PromptLogprobList
from decodegrid.engine.output_stream import OutputStream
from decodegrid.engine.output_text import OutputText
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.request_log import log_end, log_start
from decodegrid.engine.request_output import StreamOutput
from decodegrid.engine.sampling_params import SamplingParams, completion_seed
from decodegrid.engine.stop_strings import StopStrings
from decodegrid.engine.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, which gets the begin-of-sentence token, or token ids, which are taken as they are."""

_SEED_BITS = 63
_CLOSED = "this LLM is closed; make a new one"


class StreamTable:
    """After close() every call raises RuntimeError, except close, discard and the properties."""

    def __init__(
        self,
        loop: EngineLoop,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        grammars: GrammarCompiler,
    ) -> None:
        """grammars: closed with the table."""
        self._loop: EngineLoop | None = loop
        self._tokenizer = tokenizer
        self._limits = limits
        self._grammars = grammars
        self._open: dict[str, OutputStream] = {}
        self._stream_of: dict[str, OutputStream] = {}
        """By the engine's own name of each completion, which no caller chooses."""
        self._numbers = count()

    @property
    def loop(self) -> EngineLoop:
        if self._loop is None:
            raise RuntimeError(_CLOSED)
        return self._loop

    @property
    def is_closed(self) -> bool:
        return self._loop is None

    @property
    def open_ids(self) -> list[str]:
        """Names of the requests that were opened and not discarded, oldest first."""
        return list(self._open)

    @property
    def has_unfinished(self) -> bool:
        return self._loop is not None and self._loop.has_unfinished

    def build(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        index: int = 0,
        request_id: str | None = None,
        priority: int = 0,
        check_grammar: bool = True,
    ) -> OutputStream:
        """Check a prompt and make its requests; nothing is queued. Any thread may call it.

        index: place among the prompts that were given together. request_id: the caller's name;
        None makes one. priority: lower goes first. check_grammar: wait until one of the grammar
        compiler's threads has looked at the text's form; without it, a form that is no grammar is
        an error of the result. Raises RequestError.
        """
        if self._loop is None:
            raise RuntimeError(_CLOSED)
        _check_arguments(prompt, request_id, priority)
        text = prompt if isinstance(prompt, str) else None
        if text == "":
            raise RequestError("the prompt is empty; it needs at least 1 character")
        number = next(self._numbers)
        seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
        first = build_request(
            str(number) if params.n == 1 else f"{number}.0",
            self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt),
            params,
            seed=seed,
            eos_token_id=self._tokenizer.eos_token_id,
            limits=self._limits,
        )
        if check_grammar and params.structured_outputs is not None:
            self._grammars.check(params.structured_outputs.source)
        first.priority = priority
        requests = [first]
        for other in range(1, params.n):
            other_seed = completion_seed(seed, other)
            requests.append(first.sibling(f"{number}.{other}", other_seed, other))
        for request in requests:
            request.text = self._make_text(params)
        if params.prompt_logprobs is not None:
            # One of the completions is enough: the prompt is the same for all.
            first.prompt_logprobs = PromptLogprobList(
                first.token_ids,
                params.prompt_logprobs,
                self._tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens),
            )
        name = str(number) if request_id is None else request_id
        return OutputStream(index, name, text, requests)

    def check_grammar(self, source: GrammarSource) -> None:
        """What build does where it checks the grammar; any thread may call it."""
        self._grammars.check(source)

    def prepare_grammars(self) -> None:
        """Load the grammar library now, and not with the first request that has a form; nothing
        where none is served."""
        if self._limits.has_rich:
            self._grammars.prepare()

    def open(self, streams: Sequence[OutputStream]) -> None:
        """Queue built requests. Raises RequestError, and queues none, for a name in use."""
        loop = self.loop
        for stream in streams:
            if stream.request_id in self._open:
                raise RequestError(f"request id {stream.request_id!r} is in use")
        for stream in streams:
            self._open[stream.request_id] = stream
            log_start(stream)
            for request in stream.requests:
                self._stream_of[request.request_id] = stream
                loop.add(request)

    def step(self) -> list[OutputStream]:
        """Run the engine once; the streams that got a piece by it."""
        touched: dict[str, OutputStream] = {}
        for update in self.loop.step():
            stream = self._stream_of[update.request.request_id]
            touched[stream.request_id] = stream
            stream.add(update.request, update.token_ids)
            if stream.is_finished:
                log_end(stream)
        return list(touched.values())

    def run(self, streams: Sequence[OutputStream]) -> Iterator[StreamOutput]:
        """Open requests and give their pieces as they come; discards them at the end."""
        self.open(streams)
        pieces: deque[StreamOutput] = deque()
        for stream in streams:
            stream.pieces = pieces
        num_left = len(streams)
        try:
            while num_left:
                # The caller may abort some while it holds a piece, which brings pieces too.
                while pieces:
                    piece = pieces.popleft()
                    num_left -= piece.output is not None
                    yield piece
                if num_left:
                    self.step()
        finally:
            self.discard(streams)

    def abort(self, request_id: str) -> OutputStream | None:
        """End an open request now; its stream with the last pieces, or None when there is none."""
        loop = self.loop
        stream = self._open.get(request_id)
        if stream is None or stream.is_finished:
            return None
        for request in stream.requests:
            if loop.abort(request.request_id) is not None:
                stream.add(request, ())
        log_end(stream)
        return stream

    def discard(self, streams: Sequence[OutputStream]) -> None:
        """Forget requests; those that have not ended are aborted."""
        for stream in streams:
            if self._open.get(stream.request_id) is not stream:
                continue
            try:
                # Closed with streams unfinished: the device failed, and nothing is left to abort.
                if not stream.is_finished and self._loop is not None:
                    self.abort(stream.request_id)
            finally:
                del self._open[stream.request_id]
                for request in stream.requests:
                    del self._stream_of[request.request_id]
        if self._loop is not None:
            self._loop.settle()

    def close(self) -> None:
        """Abort what is open, and hold the engine no longer; may be called again."""
        if self._loop is None:
            return
        try:
            for request_id in self.open_ids:
                self.abort(request_id)
        finally:
            self._grammars.close()
            self._loop = None

    def _make_text(self, params: SamplingParams) -> OutputText:
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        if not params.stop_strings:
            return OutputText(detokenizer)
        stop = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        return OutputText(detokenizer, stop)


def _check_arguments(prompt: Prompt, request_id: str | None, priority: int) -> None:
    # For callers without a type checker.
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise RequestError(f"the prompt must be a text or a list of token ids, got {prompt!r}")
    if request_id is not None and (not isinstance(request_id, str) or not request_id):
        raise RequestError(f"request_id must be a text that is not empty, got {request_id!r}")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise RequestError(f"priority must be an integer, got {priority!r}")
