"""Guards and sizes mean the same with and without the compiler's algebra."""

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

from decodegrid.capture.code_sizes import parse_expression

NAMES = {"FloorDiv": FloorDiv, "Mod": Mod, "PythonMod": PythonMod, "Max": Max, "Min": Min}
DIRECT = [
    "7",
    "s0",
    "5*s0 + 3",
    "s0**2 - s1",
    "((s0//2))",
    "FloorDiv(s0, 3) + Mod(s1, 4)",
    "PythonMod(s0, 5)",
    "Eq(s0, 6)",
    "Ne(s0, s1)",
    "s0 < 8",
    "s0 <= s1",
    "Eq(s0, 5) | Eq(Mod(s0, 5), 0)",
    "(s0 > 2) & (s1 >= 3)",
    "Eq(2048*s0, 10240*((s0//5)))",
    "Ne((s0//5), s0)",
    "Max(s0, s1) - Min(3, s0)",
]
ALGEBRA = ["~(Eq(s0, 6))", "s0/2", "Piecewise((s0, s0 > 3), (s1, True))"]


@pytest.mark.parametrize("text", DIRECT + ALGEBRA)
def test_values_are_sympys(text):
    parsed = parse_expression(text)
    assert (parsed.code is not None) == (text in DIRECT)
    known = sympy.sympify(text, locals=NAMES)
    assert parsed.symbols == {symbol.name for symbol in known.free_symbols}
    for s0 in (2, 3, 5, 6, 10, 47):
        for s1 in (2, 6, 9):
            sizes = {"s0": s0, "s1": s1}
            want = known.subs({symbol: sizes[symbol.name] for symbol in known.free_symbols})
            got = parsed.value(sizes)
            assert bool(got == want) if want not in (True, False) else bool(got) is bool(want)


@pytest.mark.parametrize("text", ["s0 >", "", "3 3"])
def test_what_is_no_expression(text):
    with pytest.raises((SyntaxError, ValueError)):
        parse_expression(text)
