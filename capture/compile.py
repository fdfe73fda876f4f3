"""How the regions of a step are compiled: once each, with symbolic sizes, and never behind one's
back.

A region is a pure function of tensors that writes its results into output tensors among its
arguments and returns None. Owns the torch.compile settings, the count of compilations and the way
down to the innermost compiled callable, which a CPU graph replays without Dynamo, guards or
AOTAutograd wrappers. Does not own what a region computes nor when a step is captured. Data flow:
graphs hand functions to `RegionCompiler.region`; a step calls the regions; while a recorder is
active each call leaves (callable, arguments) in its program.
"""

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch._dynamo.exc import BackendCompilerFailed, RecompileError, TorchDynamoException

from decodegrid.capture.binding import BindingError, make_binding
from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.lowering import (
    CompileOptions,
    InnerCall,
    RegionError,
    compile_settings,
    graph_outputs,
    lower_eager,
    lower_inductor,
    marked_dynamic,
)
from decodegrid.capture.phases import PhaseClock, Progress
from decodegrid.capture.program import ProgramRecorder, SpreadCall, find_overlap
from decodegrid.capture.region import Region, UnplannedCompilationError
from decodegrid.capture.region_store import LoadedRegion, RegionStore, StoredRegion
from decodegrid.configs.env import set_inductor_cache_dir


class RegionCompiler:
    """Makes regions, counts their compilations, and records their calls.

    Args:
        options: compiler settings.
        counters: where compilations are planned and counted.
        clock: where compile time is booked, one phase per region; None books nothing.
        progress: a bar to advance at each compilation; None shows nothing.
        store: where compiled regions are taken from and kept; None keeps none.
    """

    def __init__(
        self,
        options: CompileOptions,
        counters: CaptureCounters,
        clock: PhaseClock | None = None,
        progress: Progress | None = None,
        store: RegionStore | None = None,
    ) -> None:
        self.options = options
        self.store = store if options.backend == "inductor" else None
        self.counters = counters
        self.progress = progress
        self._clock = clock
        self._recorder: ProgramRecorder | None = None
        self._frozen = False
        self._current_args: tuple[Any, ...] = ()
        if options.cache_dir is not None:
            options.cache_dir.mkdir(parents=True, exist_ok=True)
            set_inductor_cache_dir(options.cache_dir.resolve())

    @property
    def num_compilations(self) -> int:
        """Dynamo frames that reached the compiler so far."""
        return self.counters.num_compilations

    def region(
        self,
        function: Callable[..., None],
        dynamic: Mapping[str, tuple[int, ...]],
        *,
        name: str | None = None,
        variants: int = 1,
    ) -> Region:
        """Make a region of a plain Python function of positional arguments.

        Args:
            function: writes its results into its arguments and returns None; no graph breaks.
            dynamic: argument name -> dimensions that are symbolic (sizes 2 and up); for an
                argument that is a list or tuple of tensors the dimensions hold for each.
                Everything else is static.
            name: unique among the regions; None takes the function's name.
            variants: planned compilations, more than 1 when static arguments take several values.

        Raises:
            ValueError: not a plain function, an unknown argument in `dynamic`, or a name that is
                taken.
        """
        if not isinstance(function, types.FunctionType):
            raise ValueError(f"a region needs a plain function, not {function!r}")
        name = function.__name__ if name is None else name
        parameters = inspect.signature(function).parameters
        unknown = sorted(set(dynamic) - set(parameters))
        if unknown:
            raise ValueError(
                f"region {name!r}: dynamic names {unknown[0]!r}, which is not among its arguments "
                f"{', '.join(parameters)}"
            )
        if variants < 1:
            raise ValueError(f"region {name!r}: variants is {variants}; at least 1 is needed")
        self.counters.plan_region(name, 0 if self.options.backend == "none" else variants)
        # Dynamo keys its cache by code object; a copy keeps regions made from one source apart.
        own = types.FunctionType(
            function.__code__.replace(co_name=name),
            function.__globals__,
            name,
            function.__defaults__,
            function.__closure__,
        )
        own.__kwdefaults__ = function.__kwdefaults__
        region = Region(name, own, dynamic, variants, self._load(name, variants))
        compiled = self._wrap(region)
        region.bind_to(lambda *args: self._call(region, compiled, args))
        return region

    def opaque(self, function: Callable[..., object]) -> Callable[..., None]:
        """Make a call that runs as it is, uncompiled, and is recorded as an entry of its own.

        Args:
            function: a custom op of positional arguments that writes into its arguments and
                returns None.
        """
        spread = SpreadCall(function)

        def call(*args: Any) -> None:
            with torch.no_grad(), self._recorder.paused() if self._recorder else nullcontext():
                if function(*args) is not None:
                    raise RegionError(
                        f"opaque call {function} returned a value; it must return None"
                    )
            if self._recorder is not None:
                self._recorder.add_opaque(str(function), spread, args)

        return call

    def freeze(self) -> None:
        """Refuse every further compilation."""
        self._frozen = True

    @contextmanager
    def recording(self, recorder: ProgramRecorder) -> Iterator[None]:
        """Append the calls made in the block to a program, and refuse operations outside of calls.

        Raises:
            RuntimeError: another recorder is active.
        """
        if self._recorder is not None:
            raise RuntimeError("a step is already being recorded; captures cannot be nested")
        self._recorder = recorder
        try:
            with recorder.recording():
                yield
        finally:
            self._recorder = None

    def _load(self, name: str, variants: int) -> list[LoadedRegion]:
        if self.store is None:
            return []
        return [LoadedRegion(item) for item in self.store.load(name, variants)]

    def _call_loaded(self, region: Region, args: tuple[Any, ...]) -> bool:
        """Run a stored variant, if one fits the call."""
        for variant in region.loaded:
            inner = variant.bind(args)
            if inner is None or not (variant.is_used or self._may_compile(region)):
                continue
            with torch.no_grad(), self._recorder.paused() if self._recorder else nullcontext():
                if not variant.is_used:
                    with self._clock.phase("load regions") if self._clock else nullcontext():
                        variant.function()
                    self.counters.count_loaded(region.name)
                    if self.progress is not None:
                        self.progress.advance()
                self._add(region, variant.call(inner), args)
                variant.function()(inner)
            return True
        return False

    def _wrap(self, region: Region) -> Callable[..., object]:
        if self.options.backend == "none":
            spread = SpreadCall(region.function)

            def plain(*args: Any) -> object:
                if self._recorder is not None:
                    self._recorder.add_region(region.name, spread, args, "")
                return region.function(*args)

            return plain

        def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            return self._compile(region, module, inputs)

        compiled: Callable[..., object] = torch.compile(
            region.function, backend=backend, fullgraph=True
        )
        return compiled

    def _call(self, region: Region, compiled: Callable[..., object], args: tuple[Any, ...]) -> None:
        if region.loaded and self._call_loaded(region, args):
            return
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self._recorder is not None:
                stack.enter_context(self._recorder.paused())
            if self._may_compile(region):
                self._enter_compiler(stack, region, args)
            outer_args, self._current_args = self._current_args, args
            try:
                result = compiled(*args)
            except BackendCompilerFailed as error:
                inner = error.inner_exception
                error.add_note(f"while compiling region {region.name!r}")
                if isinstance(inner, UnplannedCompilationError):
                    reason = self._guard_failure(compiled, args)
                    raise UnplannedCompilationError(f"{inner}: {reason}") from None
                if isinstance(inner, RegionError):
                    raise inner from None
                raise
            except TorchDynamoException as error:
                error.add_note(f"while tracing region {region.name!r}")
                raise
            finally:
                self._current_args = outer_args
        if result is not None:
            raise RegionError(f"region {region.name!r} returned {type(result).__name__}, not None")

    def _may_compile(self, region: Region) -> bool:
        if self._frozen or self.options.backend == "none":
            return False
        return self.counters.num_present(region.name) < region.variants

    def _enter_compiler(self, stack: ExitStack, region: Region, args: tuple[Any, ...]) -> None:
        arguments = dict(zip(region.parameters, args, strict=True))
        stack.enter_context(compile_settings(self.options))
        stack.enter_context(marked_dynamic(region.name, region.dynamic, arguments))
        if self._clock is not None:
            stack.enter_context(self._clock.phase(f"compile {region.name}"))
        if self.progress is not None:
            self.progress.describe(f"compile {region.name}")

    def _guard_failure(self, compiled: Callable[..., object], args: tuple[Any, ...]) -> str:
        """Why the compiled variants do not fit a call: the same call again, made to fail with a
        reason."""
        try:
            with dynamo_config.patch(error_on_recompile=True):
                compiled(*args)
        except RecompileError as error:
            return str(error)
        except BackendCompilerFailed:
            pass
        return "it was never compiled before"

    def _compile(
        self, region: Region, module: torch.fx.GraphModule, inputs: list[Any]
    ) -> Callable[..., Any]:
        if not self._may_compile(region):
            why = (
                "all compilations are frozen"
                if self._frozen
                else f"its {region.variants} planned compilation(s) are made"
            )
            raise UnplannedCompilationError(
                f"region {region.name!r} needs another compilation, but {why}"
            )
        if graph_outputs(module):
            raise RegionError(
                f"region {region.name!r} returns a tensor; "
                "it must write its results into its arguments"
            )
        self.counters.count_compilation(region.name)
        if self.progress is not None:
            self.progress.advance()

        is_saved = False

        def hook(call: InnerCall) -> None:
            nonlocal is_saved
            self._record(region, call)
            if not is_saved and self.store is not None:
                self._save(self.store, region, call)
            is_saved = True

        if self.options.backend == "eager":
            return lower_eager(module, hook)
        return lower_inductor(region.name, module, inputs, hook)

    def _save(self, store: RegionStore, region: Region, call: InnerCall) -> None:
        """Keep a compiled variant for the next start, if it can be described."""
        args = self._current_args
        try:
            if not call.code:
                raise BindingError("its code holds constants of this process")
            binding = make_binding(args, call.args, call.examples, region.dynamic_leaves(args))
        except BindingError as error:
            store.notes.append(f"region {region.name!r} is not stored: {error}")
            return
        store.save(region.name, StoredRegion(call.code, binding, call.written))

    def _record(self, region: Region, call: InnerCall) -> None:
        """Append a call to the recorded program, if its arguments are the caller's own."""
        if self._recorder is None:
            return
        own = {id(item) for item in call.outer_args}
        if any(isinstance(arg, torch.Tensor) and id(arg) not in own for arg in call.args):
            raise RegionError(
                f"region {region.name!r}: AOTAutograd rebuilds its arguments at run time; some "
                "that it writes share memory with others"
            )
        self._add(region, call, self._current_args)

    def _add(self, region: Region, call: InnerCall, args: Sequence[Any]) -> None:
        """Append a call to the recorded program, if no write meets another argument.

        args: as the caller gave them, for messages.
        """
        if self._recorder is None:
            return
        overlap = find_overlap(call.args, call.written)
        if overlap is not None:
            left, right = (region.describe_argument(call.args[i], args) for i in overlap)
            raise RegionError(
                f"region {region.name!r} writes {left}, which shares memory with {right}"
            )
        self._recorder.add_region(region.name, call.function, call.args, call.code)
