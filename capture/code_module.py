"""Generated code without the compiler that made it: the part that a call needs, and its kernels.

Owns the reduction of a module that inductor wrote to what its `call` reaches, the libraries that
its kernels were built into, and the way to load both again. Does not own files
(`decodegrid.capture.region_store`). Data flow: a compiled module -> reduced text and library paths,
kept on disk -> the same machine code behind the same calls in another process.

torch's own way back into such a module asks the C++ compiler for its version, tries the machine's
vector instructions and imports the code generator; none of that is needed to call it.

Source: torch._inductor.codecache, CppPythonBindingsCodeCache and PyCodeCache; torch._ops.OpOverload
(its `_op`), of torch 2.13.
"""

import ast
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from decodegrid.configs.env import set_tensor_pointer

InnerFunction = Callable[[list[Any]], object]
"""Takes one list, which it may empty."""

_BUILDER = "async_compile"
_EXTERN = "extern_kernels"
_ENTRY = "kernel"
"""Name that every kernel's library exports itself under."""


class CodeError(ValueError):
    """Generated code of a form that cannot be kept, or a kernel that cannot be loaded."""


@dataclass(frozen=True, slots=True)
class ReducedModule:
    """What a replay needs of a generated module."""

    text: str
    """Python source; `call` is the function. Kernels are globals that it does not define."""
    kernels: tuple[str, ...]
    """Their names, in order."""


def reduce_module(source: str, extern: Mapping[str, object] | None = None) -> ReducedModule:
    """Leave out of a generated module what its `call` does not reach: the sources of its kernels,
    how they are built, its benchmark, and imports of the code generator. Ops are looked up once,
    when the module is loaded, not at each call.

    extern: what the code generator's own extern_kernels are, by name. Where it is torch's function
    of that name, the call is made to torch directly.

    Raises:
        CodeError: kernels that are not C++ behind a Python binding, or no `call`.
    """
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise CodeError(f"generated code is not Python: {error}") from None
    direct = {name for name, value in (extern or {}).items() if value is getattr(torch, name, None)}
    kernels: list[str] = []
    kept: list[ast.stmt] = []
    needed = {"call"}
    for statement in reversed(body):
        name = _built_kernel(statement)
        if name is not None:
            kernels.insert(0, name)
        elif _names(statement, ast.Load) & {_BUILDER} and _bound(statement):
            raise CodeError(f"{sorted(_bound(statement))[0]} is no C++ kernel with a binding")
        elif _bound(statement) & needed:
            statement = _trimmed(_Direct(direct).visit(statement), needed)
            ops = _Ops()
            statement = ops.visit(statement)
            added = [*ops.assignments(), statement]
            needed = needed.union(*(_names(item, ast.Load) for item in added))
            kept[:0] = added
    if "call" not in {name for statement in kept for name in _bound(statement)}:
        raise CodeError("generated code has no call")
    used = tuple(name for name in kernels if name in needed)
    module = ast.fix_missing_locations(ast.Module(kept, []))
    return ReducedModule(ast.unparse(module) + "\n", used)


def extern_kernels() -> dict[str, object]:
    """The functions of libraries that generated code in this process calls, by name."""
    from torch._inductor.select_algorithm import extern_kernels as found

    return dict(vars(found))


def kernel_libraries(function: InnerFunction, names: tuple[str, ...]) -> dict[str, Path]:
    """The libraries that hold the kernels of a module that torch loaded, by the kernels' names.

    Raises:
        CodeError: one of them is no function of a library.
    """
    space = getattr(getattr(function, "__func__", function), "__globals__", {})
    found = {}
    for name in names:
        owner = getattr(space.get(name), "__self__", None)
        path = getattr(owner, "__file__", None)
        if not isinstance(owner, types.ModuleType) or path is None:
            raise CodeError(f"{name} is no function of a library")
        found[name] = Path(path)
    return found


def load_kernel(path: Path, digest: str) -> Callable[..., object]:
    """A kernel from its library, which must have been checked: loading it runs it.

    digest: names the content, so that another content under the same path is not taken for it.

    Raises:
        CodeError: the system does not load it.
    """
    pointer = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    set_tensor_pointer(int(pointer))
    # The last part of the name is what the library exports.
    name = f"decodegrid_{digest}.{_ENTRY}"
    spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, str(path)))
    assert spec is not None and spec.loader is not None
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise CodeError(f"{path}: {error}") from error
    kernel: Callable[..., object] = getattr(module, _ENTRY)
    return kernel


def load_module(
    code: types.CodeType, kernels: Mapping[str, Callable[..., object]]
) -> InnerFunction:
    """The `call` of a reduced module, compiled to a code object, with its kernels."""
    space: dict[str, Any] = {"__name__": code.co_filename, **kernels}
    exec(code, space)
    call: InnerFunction = space["call"]
    return call


class _Direct(ast.NodeTransformer):
    """Turns extern_kernels.NAME into torch.NAME for the names given."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        base = node.value
        if isinstance(base, ast.Name) and base.id == _EXTERN and node.attr in self._names:
            base.id = "torch"
        return node


class _Ops(ast.NodeTransformer):
    """Turns calls of torch.ops.SPACE.NAME.OVERLOAD into calls of a global that holds the op.

    The global is what the overload itself calls: to go through four attributes and a Python
    function costs as much as a small op does.
    """

    def __init__(self) -> None:
        self._found: dict[str, ast.expr] = {}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        path = ast.unparse(node.func).split(".")
        if path[:2] == ["torch", "ops"] and len(path) == 5:
            name = "_".join(("op", *path[2:]))
            self._found[name] = node.func
            node.func = ast.Name(name, ast.Load())
        return node

    def assignments(self) -> list[ast.stmt]:
        """Statements that bind the globals; they need `torch`."""
        return [
            ast.Assign([ast.Name(name, ast.Store())], ast.Attribute(op, "_op", ast.Load()))
            for name, op in self._found.items()
        ]


def _built_kernel(statement: ast.stmt) -> str | None:
    """The name that a statement binds to a C++ kernel, or None for any other statement."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return None
    function, target = statement.value.func, statement.targets[0]
    is_built = (
        isinstance(function, ast.Attribute)
        and function.attr == "cpp_pybinding"
        and isinstance(function.value, ast.Name)
        and function.value.id == _BUILDER
    )
    return target.id if is_built and isinstance(target, ast.Name) else None


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a statement of a module binds."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.split(".")[0] for alias in statement.names}
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    return _names(statement, ast.Store)


def _trimmed(statement: ast.stmt, needed: set[str]) -> ast.stmt:
    """An import without the names that nothing needs."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        statement.names = [
            alias
            for alias in statement.names
            if (alias.asname or alias.name.split(".")[0]) in needed
        ]
    return statement


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {
        item.id
        for item in ast.walk(node)
        if isinstance(item, ast.Name) and isinstance(item.ctx, context)
    }
