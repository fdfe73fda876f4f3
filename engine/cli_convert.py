"""`decodegrid convert`: a checkpoint of floats as a quantised one, and back.

Owns the verb's arguments and the printed table of what the conversion changed. The conversion
itself stands in graphs/checkpoint_convert.py. Imports torch only when it runs.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from decodegrid.configs.byte_size import parse_size
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.llm import LLM

if TYPE_CHECKING:
    from decodegrid.graphs.checkpoint_convert import KindReport


def add_convert_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "convert",
        help="write a quantised copy of a checkpoint, or a float copy of a quantised one",
        description="Write the checkpoint SRC as DST in another form and print what it changed. "
        "Works from file to file and needs memory for one shard.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SRC", help='checkpoint directory, or "tiny"')
    parser.add_argument("target", metavar="DST", help="directory to make; absent or empty")
    parser.add_argument(
        "--to",
        choices=("fp8", "bf16", "f32"),
        help="fp8: the released format (FP8 and MXFP4 weights); bf16, f32: floats (default: fp8 "
        "from floats, bf16 from a quantised checkpoint)",
    )
    parser.add_argument(
        "--max-shard-size",
        default="4GiB",
        metavar="SIZE",
        help="most bytes of one file, such as 512MiB; a tensor is never split (default: 4GiB)",
    )
    parser.set_defaults(run=_convert)


def _convert(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    max_shard_bytes = _read_size(args.max_shard_size)
    # Imported here: the other commands check their arguments before torch is loaded.
    from decodegrid.graphs.checkpoint_convert import convert_checkpoint

    reports = convert_checkpoint(
        args.source,
        args.target,
        args.to,
        max_shard_bytes=max_shard_bytes,
        progress=sys.stderr.isatty(),
    )
    print(_format(reports))
    print(f"written to {args.target}")
    return 0


def _read_size(text: str) -> int:
    """Bytes of `text`, such as "4GiB" or "1000"; ValueError for anything else and for 0."""
    try:
        size = parse_size(text)
    except ValueError:
        size = 0
    if size < 1:
        raise ValueError(f"--max-shard-size is {text!r}; must be a size such as 4GiB or 512MB")
    return size


def _format(reports: Sequence["KindReport"]) -> str:
    """The table of errors by stored kind."""
    head = ("kind", "tensors", "bytes before", "bytes after", "max |error|", "relative RMS error")
    rows = [head]
    for report in reports:
        rows.append(
            (
                report.kind,
                f"{report.tensors:,}",
                f"{report.bytes_before:,}",
                f"{report.bytes_after:,}",
                f"{report.max_error:.3g}",
                f"{report.relative_rms_error:.3g}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = []
    for row in rows:
        cells = [f"{row[0]:<{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)
