"""Expressions over symbolic sizes, as the compiler prints them, evaluated without its algebra.

Owns the forms that are evaluated directly. Anything else goes to sympy, which means the same and
takes a while to import. Data flow: text of a guard or size -> a compiled expression, once -> its
value for the sizes of a call.

Source: torch.utils._sympy.functions for the meaning of FloorDiv, Mod and PythonMod.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, MappingProxyType
from typing import Any

_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "Eq": lambda left, right: left == right,
        "Ne": lambda left, right: left != right,
        # Sizes are not negative, where all three agree with Python's operators.
        "FloorDiv": lambda left, right: left // right,
        "Mod": lambda left, right: left % right,
        "PythonMod": lambda left, right: left % right,
        "Max": max,
        "Min": min,
    }
)
_OPERATORS = (
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Pow, ast.BitAnd, ast.BitOr, ast.USub,
    ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip
_SHAPES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Name, ast.Constant, ast.Load,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Expression:
    """One text, ready to be evaluated."""

    symbols: frozenset[str]
    code: CodeType | None
    """None where sympy has to evaluate it."""
    text: str

    def value(self, sizes: Mapping[str, int]) -> Any:
        """Its value, a number or a truth value; `sizes` has every symbol."""
        if self.code is not None:
            names = {name: sizes[name] for name in self.symbols}
            return eval(self.code, {"__builtins__": {}, **_FUNCTIONS}, names)
        parsed = _sympify(self.text)
        return parsed.subs({symbol: sizes[symbol.name] for symbol in parsed.free_symbols})


@lru_cache(maxsize=4096)
def parse_expression(text: str) -> Expression:
    """Parse a text that the compiler printed; raises SyntaxError, or one of sympy's errors."""
    tree = ast.parse(text, mode="eval")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    if all(_is_direct(node) for node in ast.walk(tree)):
        symbols = frozenset(
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and id(node) not in called
        )
        return Expression(symbols, compile(tree, "<size>", "eval"), text)
    parsed = _sympify(text)
    return Expression(frozenset(symbol.name for symbol in parsed.free_symbols), None, text)


def _is_direct(node: ast.AST) -> bool:
    """Whether Python's own meaning of a node is the compiler's."""
    if isinstance(node, ast.Call):
        is_plain = isinstance(node.func, ast.Name) and not node.keywords
        return is_plain and getattr(node.func, "id", "") in _FUNCTIONS
    if isinstance(node, ast.Compare):
        return len(node.ops) == 1
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int)
    return isinstance(node, (*_OPERATORS, *_SHAPES))


def _sympify(text: str) -> Any:
    # Imported here: a start from stored regions seldom needs it, and it is slow to import.
    import sympy  # type: ignore[import-untyped]
    from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

    return sympy.sympify(text, locals={"FloorDiv": FloorDiv, "Mod": Mod, "PythonMod": PythonMod})
