"""How one traced region becomes the innermost callable that a replay calls.

Owns the compiler settings, the marks for symbolic dimensions, and the checks that nothing of a
region's work happens outside the compiled code. Does not count or plan compilations
(`decodegrid.capture.compile`). Data flow: Dynamo hands a graph to `lower_eager` or
`lower_inductor`; the callable that comes back reports each of its calls, with the innermost
callable and its flat arguments, to a hook.

torch's compiler is imported by the functions that use it: a start that compiles nothing is done
before it would be loaded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from decodegrid.capture.program import SpreadCall

if TYPE_CHECKING:
    from torch._inductor.output_code import CompiledFxGraph

Backend = Literal["inductor", "eager", "none"]
MARK_PREFIXES = ("_dynamo_", "_has_dynamo_", "_specialize_on")


class RegionError(ValueError):
    """A function cannot be a region, or was called in a way that a replay would not repeat."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Settings of the compiler that are the same for every region."""

    backend: Backend = "inductor"
    """inductor: generated code. eager: traced whole, run by torch operators. none: the plain
    function."""
    cache_dir: Path | None = None
    """Where generated code and compiled graphs are kept for the next start; None keeps torch's
    default. torch reads it from the process environment, so it holds for the whole process."""
    num_threads: int | None = None
    """Threads compiled into CPU loops; None takes torch.get_num_threads() at compile time."""


@dataclass(frozen=True, slots=True)
class InnerCall:
    """One call of a region at its lowest level."""

    function: Callable[[list[Any]], object]
    """Takes one list, which it may empty."""
    args: Sequence[Any]
    """Its tensors and sizes."""
    outer_args: Sequence[Any]
    """The tensors and sizes that Dynamo passed for the same call."""
    written: frozenset[int]
    """Indices into args that are written; empty where it is not known."""
    code: str = ""
    """The generated module whose `call` is the function; empty where there is none."""
    examples: Sequence[Any] = ()
    """The symbolic tensors and sizes that the code was generated for, one for each of args."""


CallHook = Callable[[InnerCall], None]


@contextmanager
def compile_settings(options: CompileOptions) -> Iterator[None]:
    """The torch settings under which regions are compiled."""
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    import torch.fx.experimental._config as symbolic_config

    threads = options.num_threads
    with ExitStack() as stack:
        # Only marked dimensions are symbolic; a change anywhere else is a compilation, which is
        # counted.
        stack.enter_context(
            dynamo_config.patch(assume_static_by_default=True, automatic_dynamic_shapes=False)
        )
        # Two sizes that are equal while compiling stay two symbols. Marked dimensions do so anyway;
        # this says it for sizes that a trace derives.
        stack.enter_context(symbolic_config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
        # A hit in this cache would skip the inner compiler, through which the innermost callable
        # is found.
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        stack.enter_context(
            inductor_config.patch(
                {
                    # Checks on sizes that capture has fixed cost more than a small kernel.
                    "size_asserts": False,
                    "alignment_asserts": False,
                    "scalar_asserts": False,
                    # The C++ wrapper converts its arguments on every call: 8 us against 0.5 us.
                    "cpp_wrapper": False,
                    "fx_graph_cache": True,
                    "cpp.threads": -1 if threads is None else threads,
                }
            )
        )
        yield


def lower_eager(module: torch.fx.GraphModule, hook: CallHook) -> Callable[..., Any]:
    """Run a traced region with torch operators; calls `hook` before each run."""
    forward = module.forward
    spread = SpreadCall(forward)

    def run(*flat: Any) -> Any:
        hook(InnerCall(spread, flat, flat, frozenset()))
        return forward(*flat)

    return run


def lower_inductor(
    name: str, module: torch.fx.GraphModule, inputs: Sequence[Any], hook: CallHook
) -> Callable[..., Any]:
    """Compile a traced region with inductor; calls `hook` before each run.

    Raises:
        RegionError: AOTAutograd keeps some of the region's writes for after the compiled code, or
            there is nothing to compile.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.output_code import CompiledFxGraph

    outer_args: list[Sequence[Any]] = []

    def inner_compile(
        inner: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any
    ) -> Any:
        if graph_outputs(inner):
            raise RegionError(
                f"region {name!r}: AOTAutograd would finish its writes outside the compiled code"
            )
        compiled = compile_fx_inner(inner, example_inputs, **settings)
        if not isinstance(compiled, CompiledFxGraph):
            raise RegionError(f"region {name!r} computes nothing")
        written = written_inputs(inner)
        innermost = innermost_callable(compiled)
        # Constants live in the process, not in the generated code.
        code = "" if compiled.constants or compiled.torchbind_constants else compiled.source_code
        examples = tuple(example_inputs)

        def run(args: list[Any]) -> Any:
            hook(InnerCall(innermost, args, outer_args[-1], written, code, examples))
            return compiled(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    lowered = compile_fx(module, inputs, inner_compile=inner_compile)
    compiled_outer = cast("Callable[..., Any]", lowered)

    def outer(*flat: Any) -> Any:
        outer_args.append(flat)
        try:
            return compiled_outer(*flat)
        finally:
            outer_args.pop()

    return outer


def graph_outputs(module: torch.fx.GraphModule) -> Sequence[Any]:
    """The values that a traced graph returns."""
    (output,) = module.graph.find_nodes(op="output")
    outputs: Sequence[Any] = output.args[0]
    return outputs


def written_inputs(module: torch.fx.GraphModule) -> frozenset[int]:
    """Indices of the graph inputs that some operator of a functionalized graph writes."""
    index = {node: i for i, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    written: set[int] = set()
    for node in module.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            alias = argument.alias_info
            if alias is not None and alias.is_write and value in index:
                written.add(index[value])
    return frozenset(written)


def innermost_callable(compiled: "CompiledFxGraph") -> Callable[[list[Any]], object]:
    """The generated function below inductor's own bookkeeping; takes one list and empties it."""
    innermost = compiled.current_callable
    if innermost is None:
        raise RuntimeError("inductor returned a compiled graph without a callable")
    return innermost


@contextmanager
def marked_dynamic(
    name: str, dynamic: Mapping[str, tuple[int, ...]], arguments: Mapping[str, Any]
) -> Iterator[None]:
    """Mark a region's symbolic dimensions on its argument tensors for one call.

    Args:
        name: the region, for messages.
        dynamic: argument name -> symbolic dimensions.
        arguments: argument name -> a tensor, or a list or tuple of tensors.

    Marks are attributes of the tensors; they are taken off afterwards because the same buffer may
    be static in another region.

    Raises:
        RegionError: a marked dimension has size 0 or 1, which would be compiled as a constant.
    """
    marked: list[torch.Tensor] = []
    try:
        for argument, dims in dynamic.items():
            value = arguments[argument]
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                for dim in dims:
                    if tensor.shape[dim] < 2:
                        raise RegionError(
                            f"region {name!r}: symbolic dimension {dim} of {argument} has size "
                            f"{tensor.shape[dim]}; at least 2 is needed"
                        )
                    marked.append(tensor)
                    torch._dynamo.mark_dynamic(tensor, dim)
        yield
    finally:
        for tensor in marked:
            for attribute in [name for name in vars(tensor) if name.startswith(MARK_PREFIXES)]:
                delattr(tensor, attribute)
