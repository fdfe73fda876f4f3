"""Reads which machine instructions the functions of a cubin have.

Owns the finding of NVIDIA's cuobjdump and the reading of its text. It is looked for on the PATH,
then in the package triton, which carries it.

Data flow: cubin -> cuobjdump -sass -> opcodes of each function.
"""

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


def find_disassembler() -> str | None:
    """Path of cuobjdump, or None."""
    found = shutil.which("cuobjdump")
    if found is not None:
        return found
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    carried = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(carried) if carried.is_file() else None


def parse(text: str) -> dict[str, Counter[str]]:
    """How often each function has each opcode, with its modifiers, in the text of cuobjdump."""
    functions: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for line in text.splitlines():
        if named := _FUNCTION.match(line):
            current = functions.setdefault(named[1], Counter())
        elif opcode := _OPCODE.match(line):
            current[opcode[1]] += 1
    return functions


def opcodes(cubin: Path) -> dict[str, Counter[str]]:
    """`parse` of a cubin. Raises FileNotFoundError where there is no cuobjdump."""
    tool = find_disassembler()
    if tool is None:
        raise FileNotFoundError("cuobjdump is neither on the PATH nor in the package triton")
    run = subprocess.run([tool, "-sass", str(cubin)], capture_output=True, text=True, check=True)
    return parse(run.stdout)
