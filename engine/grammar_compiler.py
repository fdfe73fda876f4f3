"""Compiles grammars beside the engine's thread and keeps the last of them.

Owns the threads, the cache and all use of xgrammar. Knows no requests. Data flow: a source is
submitted and becomes a job, shared by all who want the same one; a thread compiles it; matchers are
made from what came out. xgrammar brings transformers along and takes seconds to import: the first
grammar does it, in one of the threads, or prepare() before.

A compilation cannot be stopped. One that runs on after its requests gave up keeps its thread, and
its result serves later ones; the threads do not hold up the end of the process.
"""

import json
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from decodegrid.configs.grammar_section import StructuredOutputsSection
from decodegrid.engine.grammar_matcher import Matcher
from decodegrid.engine.grammar_params import GrammarSource
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.runner_protocol import num_mask_words

if TYPE_CHECKING:
    import xgrammar

MAX_WHITESPACE: Final = 64
"""Characters of whitespace between two parts of a JSON value, where any whitespace may stand."""
_CONTROL: Final = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
"""Bytes whose tokens JSON does without. A string must not hold them, and xgrammar lets them through
where its length has a bound; a tab is the one that could stand elsewhere, as whitespace."""
_CONTROL_IN_CALLS: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
"""The same for tool calls, whose arguments that are strings stand there as they are: tabs may."""
_Words = Literal["text", "json", "calls"]
_WORDS_OF: Final[Mapping[str, _Words]] = MappingProxyType(
    {"json": "json", "json_object": "json", "calls": "calls"}
)
"""What the tokens may hold, by the kind of grammar."""
_LOCATION = re.compile(r"^\[[\d:]+\] \S+?\.(?:cc|h):\d+: ")
_CHECK = re.compile(r"^Check failed: \(.*?\) is false: ")


class GrammarJob:
    """One source on its way; `compiled` or `error` is set once, when it is done."""

    __slots__ = ("compiled", "error", "num_bytes", "source")

    def __init__(self, source: GrammarSource) -> None:
        self.source = source
        self.compiled: Any = None
        self.error: str | None = None
        self.num_bytes = 0

    @property
    def is_done(self) -> bool:
        return self.compiled is not None or self.error is not None


class _Check:
    """A source that a thread looks at without compiling it; `is_done` is set once."""

    __slots__ = ("error", "is_done", "source")

    def __init__(self, source: GrammarSource) -> None:
        self.source = source
        self.error: Exception | None = None
        self.is_done = False


class GrammarCompiler:
    """Any thread may call it."""

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        vocab_size: int,
        eos_token_id: int,
        settings: StructuredOutputsSection,
        marks: Mapping[int, bytes] = MappingProxyType({}),
    ) -> None:
        """bytes_of: a token's bytes; none for a token that stands for no text, which no grammar
        allows. marks: spellings of special tokens that tool calls and reasoning are made of, which
        the grammars of those allow. Starts nothing."""
        self.timeout_s = settings.compile_timeout_s
        self.num_words = num_mask_words(vocab_size)
        self._bytes_of = bytes_of
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._settings = settings
        self._marks = marks
        self._changed = threading.Condition()
        self._jobs: OrderedDict[GrammarSource, GrammarJob] = OrderedDict()
        """Those that run or wait, and the cache; the one used last at the end."""
        self._queue: deque[GrammarJob | _Check] = deque()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._library_lock = threading.Lock()
        self._libraries: dict[_Words, xgrammar.GrammarCompiler] = {}
        """By what their tokens may hold."""

    @property
    def cached_bytes(self) -> int:
        """Memory of the grammars that are kept."""
        with self._changed:
            return sum(job.num_bytes for job in self._jobs.values())

    def prepare(self) -> None:
        """Import xgrammar and tell it the vocabulary, in the caller's thread."""
        for words in get_args(_Words):
            self._get_library(words)

    def check(self, source: GrammarSource) -> None:
        """Raise RequestError where a source is no grammar; nothing is compiled.

        Waits for a thread to look at it, at most `timeout_s`; one that takes longer is let through,
        and fails when it is waited for as a job.
        """
        with self._changed:
            if source in self._jobs or self._is_closed:
                return
            check = _Check(source)
            # Before all jobs: they take longer, and nobody waits for them here.
            self._queue.appendleft(check)
            self._start_thread()
            self._changed.wait_for(lambda: check.is_done or self._is_closed, self.timeout_s)
            if check in self._queue:
                self._queue.remove(check)
        if check.error is not None:
            raise check.error

    def submit(self, source: GrammarSource) -> GrammarJob:
        """The job of a source, which may be done already."""
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the grammar compiler is closed")
            job = self._jobs.get(source)
            if job is not None:
                self._jobs.move_to_end(source)
                return job
            job = self._jobs[source] = GrammarJob(source)
            self._queue.append(job)
            self._start_thread()
            return job

    def withdraw(self, job: GrammarJob) -> None:
        """Forget a job that nobody waits for any more, if it has not begun: it would hold up those
        behind it."""
        with self._changed:
            if job in self._queue:
                self._queue.remove(job)
                del self._jobs[job.source]

    def matcher(self, job: GrammarJob) -> Matcher:
        """A fresh matcher of a job that is done."""
        import xgrammar

        made = xgrammar.GrammarMatcher(job.compiled)
        if job.source.kind == "calls":
            from decodegrid.engine.grammar_tags import text_before

            before = text_before(job.source.text)
            assert not before or made.accept_string(before), "calls open as the prompt has them"
        matcher: Matcher = made
        return matcher

    def wait(self, seconds: float) -> None:
        """Wait until a job is done, at most so long."""
        with self._changed:
            self._changed.wait(seconds)

    def close(self) -> None:
        """Start no more jobs and forget the cache; what runs is not waited for."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._queue.clear()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        """Have what was queued taken; called with the lock."""
        if len(self._threads) < self._settings.compile_threads:
            name = f"grammar-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        """A thread's life."""
        while True:
            with self._changed:
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                job = self._queue.popleft()
            if isinstance(job, _Check):
                self._look_at(job)
                continue
            try:
                compiled, error = self._compile(job.source), None
            except Exception as problem:  # whatever it is, it is the request's failure alone
                compiled, error = None, _message(problem)
            self._finish(job, compiled, error)

    def _look_at(self, check: _Check) -> None:
        try:
            check_grammar(check.source)
        except Exception as problem:  # whatever it is, it is raised where it was asked for
            check.error = problem
        with self._changed:
            check.is_done = True
            self._changed.notify_all()

    def _finish(self, job: GrammarJob, compiled: Any, error: str | None) -> None:
        with self._changed:
            job.num_bytes = 0 if compiled is None else int(compiled.memory_size_bytes)
            job.compiled, job.error = compiled, error
            # A failed one is forgotten: whoever asks again shall have it tried again.
            if error is not None and self._jobs.get(job.source) is job:
                del self._jobs[job.source]
            self._shrink()
            self._changed.notify_all()

    def _shrink(self) -> None:
        """Drop what was unused for longest, until the rest fits; called with the lock."""
        total = sum(job.num_bytes for job in self._jobs.values())
        for source, job in list(self._jobs.items()):
            if total <= self._settings.cache_bytes:
                return
            if job.is_done:
                total -= job.num_bytes
                del self._jobs[source]

    def _compile(self, source: GrammarSource) -> "xgrammar.CompiledGrammar":
        library = self._get_library(_WORDS_OF.get(source.kind, "text"))
        match source.kind:
            case "json" | "json_object":
                return library.compile_json_schema(**_schema_arguments(source))
            case "regex":
                return library.compile_regex(source.text)
            case "choice":
                return library.compile_grammar(_choice_grammar(source.text))
            case "grammar":
                return library.compile_grammar(source.text)
            case "calls":
                return library.compile_structural_tag(_tag(source, self._silent_ids()))

    def _silent_ids(self) -> list[int]:
        """Marks, and tokens without a text."""
        ids = range(self._vocab_size)
        return [i for i in ids if i in self._marks or not self._bytes_of(i)]

    def _get_library(self, words: "_Words") -> "xgrammar.GrammarCompiler":
        with self._library_lock:
            if words not in self._libraries:
                import xgrammar

                vocabulary = [self._bytes_of(token_id) for token_id in range(self._vocab_size)]
                if words != "text":
                    control = _CONTROL if words == "json" else _CONTROL_IN_CALLS
                    vocabulary = [b"" if control.search(text) else text for text in vocabulary]
                if words == "calls":
                    for token_id, text in self._marks.items():
                        vocabulary[token_id] = text
                # A stop token's bytes, were there any, would be text.
                vocabulary[self._eos_token_id] = b""
                info = xgrammar.TokenizerInfo(
                    vocabulary,
                    xgrammar.VocabType.RAW,
                    vocab_size=self._vocab_size,
                    stop_token_ids=[self._eos_token_id],
                )
                # One thread a grammar, and the cache is here, where it has a bound.
                self._libraries[words] = xgrammar.GrammarCompiler(
                    info, max_threads=1, cache_enabled=False
                )
            return self._libraries[words]


def check_grammar(source: GrammarSource) -> None:
    """Raise RequestError where a source is no grammar, with what xgrammar says about it."""
    import xgrammar

    name = "tools" if source.kind == "calls" else f"structured_outputs.{source.kind}"
    try:
        match source.kind:
            case "json":
                xgrammar.Grammar.from_json_schema(**_schema_arguments(source))
            case "regex":
                xgrammar.Grammar.from_regex(source.text)
            case "grammar":
                xgrammar.Grammar.from_ebnf(source.text)
            case "calls":
                xgrammar.Grammar.from_structural_tag(_tag(source))
    except (RuntimeError, ValueError) as error:
        raise RequestError(f"{name}: {_message(error)}") from None


def _tag(source: GrammarSource, silent_ids: Sequence[int] = ()) -> "xgrammar.StructuralTag":
    from decodegrid.engine.grammar_tags import structural_tag

    return structural_tag(source.text, MAX_WHITESPACE, silent_ids)


def _schema_arguments(source: GrammarSource) -> dict[str, Any]:
    """For both, the check and the compilation."""
    return {
        "schema": source.text or '{"type": "object"}',
        "any_whitespace": source.any_whitespace,
        "max_whitespace_cnt": MAX_WHITESPACE if source.any_whitespace else None,
        "separators": None if source.any_whitespace else (", ", ": "),
    }


def _choice_grammar(text: str) -> str:
    """EBNF of a JSON list of strings; its strings are written as JSON's."""
    choices = json.loads(text)
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _message(error: Exception) -> str:
    """An error of xgrammar without the place in its source code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return f"refused ({type(error).__name__})"
    return _CHECK.sub("", _LOCATION.sub("", lines[0]))
