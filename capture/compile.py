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

from decodegrid.capture.binding import BindingError, make_binding
from decodegrid.capture.code_module import CodeError
from decodegrid.capture.code_tracing import call_traced, trace
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
from decodegrid.capture.region import NotStoredError, Region, UnplannedCompilationError
from decodegrid.capture.region_store import LoadedRegion, RegionStore
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
        self._regions: list[Region] = []
        self._bind_only = False
        self._traced: dict[str, Callable[..., object]] = {}
        """Dynamo's callables by region, made when a call first needs them."""

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
        self._regions.append(region)
        region.bind_to(lambda *args: self._call(region, args))
        return region

    def opaque(self, function: Callable[..., object]) -> Callable[..., None]:
        """Make a call that runs as it is, uncompiled, and is recorded as an entry of its own.

        Args:
            function: a custom op of positional arguments that writes into its arguments and
                returns None.
        """
        spread = SpreadCall(function)

        def call(*args: Any) -> None:
            if self._bind_only and self._recorder is not None:
                self._recorder.add_opaque(str(function), spread, args)
                return
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

    @property
    def is_stored(self) -> bool:
        """Whether every planned variant of every region is stored, code and all."""
        return bool(self._regions) and all(
            len(region.loaded) == region.variants and all(item.is_whole for item in region.loaded)
            for region in self._regions
        )

    @contextmanager
    def recording(self, recorder: ProgramRecorder, *, bind_only: bool = False) -> Iterator[None]:
        """Append the calls made in the block to a program, and refuse operations outside of calls.

        bind_only: the calls are bound to stored code and not made; nothing is written. What such a
        block may do was checked when the code was stored, whose key has the step's source.

        Raises:
            RuntimeError: another recorder is active.
            NotStoredError: `bind_only`, and no stored variant fits a call.
        """
        if self._recorder is not None:
            raise RuntimeError("a step is already being recorded; captures cannot be nested")
        self._recorder, self._bind_only = recorder, bind_only
        try:
            with nullcontext() if bind_only else recorder.recording():
                yield
        finally:
            self._recorder, self._bind_only = None, False

    def _load(self, name: str, variants: int) -> list[LoadedRegion]:
        if self.store is None:
            return []
        return [LoadedRegion(item) for item in self.store.load(name, variants)]

    def _call_loaded(self, region: Region, args: tuple[Any, ...]) -> bool:
        """Run a stored variant, if one fits the call."""
        for variant in region.loaded:
            inner = variant.bind(args)
            if inner is None or not (variant.is_used or self._take(region, variant)):
                continue
            if self._bind_only and self._recorder is not None:
                call = variant.function(), inner, variant.stored.code
                self._recorder.add_region(region.name, *call)
                return True
            with torch.no_grad(), self._recorder.paused() if self._recorder else nullcontext():
                self._add(region, variant.call(inner), args)
                variant.function()(inner)
            return True
        return False

    def _take(self, region: Region, variant: LoadedRegion) -> bool:
        """Load a stored variant's code and count it; False where another is not planned, or where
        the code does not load."""
        if not self._may_compile(region):
            return False
        if not variant.is_whole:
            self._use_cache_dir()
        try:
            with self._clock.phase("load regions") if self._clock else nullcontext():
                variant.function()
        except CodeError as error:
            assert self.store is not None
            self.store.reject(region.name, variant, str(error))
            region.loaded = tuple(other for other in region.loaded if other is not variant)
            return False
        self.counters.count_loaded(region.name)
        if self.progress is not None:
            self.progress.advance()
        return True

    def _use_cache_dir(self) -> None:
        """Make torch keep what it compiles where the options say; before it compiles anything."""
        if self.options.cache_dir is not None:
            self.options.cache_dir.mkdir(parents=True, exist_ok=True)
            set_inductor_cache_dir(self.options.cache_dir.resolve())

    def _call(self, region: Region, args: tuple[Any, ...]) -> None:
        if region.loaded and self._call_loaded(region, args):
            return
        if self._bind_only:
            raise NotStoredError(region.name)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self._recorder is not None:
                stack.enter_context(self._recorder.paused())
            if self._may_compile(region):
                self._enter_compiler(stack, region, args)
            outer_args, self._current_args = self._current_args, args
            try:
                if self.options.backend == "none":
                    result = self._call_plain(region, args)
                else:
                    result = self._call_compiled(region, args)
            finally:
                self._current_args = outer_args
        if result is not None:
            raise RegionError(f"region {region.name!r} returned {type(result).__name__}, not None")

    def _call_plain(self, region: Region, args: tuple[Any, ...]) -> object:
        if self._recorder is not None:
            self._recorder.add_region(region.name, SpreadCall(region.function), args, "")
        return region.function(*args)

    def _call_compiled(self, region: Region, args: tuple[Any, ...]) -> object:
        if region.name not in self._traced:
            self._traced[region.name] = trace(
                region.function, lambda module, inputs: self._compile(region, module, inputs)
            )
        return call_traced(region.name, self._traced[region.name], args)

    def _may_compile(self, region: Region) -> bool:
        if self._frozen or self.options.backend == "none":
            return False
        return self.counters.num_present(region.name) < region.variants

    def _enter_compiler(self, stack: ExitStack, region: Region, args: tuple[Any, ...]) -> None:
        arguments = dict(zip(region.parameters, args, strict=True))
        self._use_cache_dir()
        stack.enter_context(compile_settings(self.options))
        stack.enter_context(marked_dynamic(region.name, region.dynamic, arguments))
        if self._clock is not None:
            stack.enter_context(self._clock.phase(f"compile {region.name}"))
        if self.progress is not None:
            self.progress.describe(f"compile {region.name}")

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
        store.keep(region.name, call, binding)

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
