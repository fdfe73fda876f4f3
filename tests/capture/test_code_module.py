"""What is kept of a generated module: no more than a call reaches, and nothing less."""

import pytest
import torch

from decodegrid.capture.code_module import (
    CodeError,
    kernel_libraries,
    load_kernel,
    load_module,
    reduce_module,
)

MODULE = """
import os, math
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels, unused
from math import inf, nan

aten = torch.ops.aten
unused_name = torch.ops.nothing
async_compile = AsyncCompile()

cpp_one = async_compile.cpp_pybinding(['float*'], r'''
kernel text
''')

cpp_two = async_compile.cpp_pybinding(['float*'], r'''
kernel text
''')

async_compile.wait(globals())
del async_compile

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        left, right, out = args
        args.clear()
        extern_kernels.mm(left, right, out=out)
        cpp_two(out, math.floor(2.5))
        return ()

runner = Runner(partitions=[])
call = runner.call
recursively_apply_fns = runner.call

def get_args():
    raise AssertionError


if __name__ == "__main__":
    raise AssertionError
"""


def test_only_what_a_call_reaches_is_kept():
    reduced = reduce_module(MODULE, {"mm": torch.mm, "bmm": object()})
    assert reduced.kernels == ("cpp_two",)
    assert "_inductor" not in reduced.text and "kernel text" not in reduced.text
    for name in ("aten", "unused", "get_args", "AssertionError", "inf", "os", "recursively"):
        assert name not in reduced.text, name
    called = []
    code = compile(reduced.text, "test", "exec")
    call = load_module(code, {"cpp_two": lambda *args: called.append(args)})
    left, right, out = torch.rand(2, 3), torch.rand(3, 4), torch.zeros(2, 4)
    args = [left, right, out]
    assert call(args) == () and args == []
    assert torch.equal(out, left @ right)
    assert called == [(out, 2)]


def test_a_function_that_is_not_torchs_own_is_called_where_it_is():
    reduced = reduce_module(MODULE, {"mm": lambda *args, out: out.fill_(7.0)})
    assert "from torch._inductor.select_algorithm import extern_kernels\n" in reduced.text
    assert "extern_kernels.mm(" in reduced.text and "async_compile" not in reduced.text


def test_an_op_is_looked_up_once(monkeypatch):
    source = """
import torch

def call(args):
    x, = args
    y = torch.ops.aten.cumsum.default(x, 1)
    torch.ops.aten.add_.Tensor(y, torch.ops.aten.cumsum.default(y, 0), alpha=2)
    return y.relu()
"""
    reduced = reduce_module(source)
    call = load_module(compile(reduced.text, "test", "exec"), {})
    assert reduced.text.count("torch.ops.aten.cumsum.default") == 1
    # Nothing of it is asked for at a call.
    monkeypatch.setattr(torch, "ops", None)
    x = torch.rand(3, 4) - 0.5
    y = x.cumsum(1)
    assert torch.equal(call([x]), (y + 2 * y.cumsum(0)).relu())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def call(:", "not Python"),
        ("x = 3\n", "has no call"),
        ("k = async_compile.triton('k', 'text')\ndef call(args):\n    k()\n", "k is no C"),
        ("k, j = async_compile.cpp('text')\ndef call(args):\n    k()\n", "is no C"),
    ],
)
def test_other_modules_are_refused(source, message):
    with pytest.raises(CodeError, match=message):
        reduce_module(source)


def test_a_kernel_is_a_function_of_a_library():
    def call(args: list) -> None:
        del args

    with pytest.raises(CodeError, match="cpp_one is no function of a library"):
        kernel_libraries(call, ("cpp_one",))


def test_a_file_that_is_no_library(tmp_path):
    path = tmp_path / "kernel.so"
    path.write_bytes(b"text")
    with pytest.raises(CodeError, match=r"kernel\.so"):
        load_kernel(path, "0" * 64)
