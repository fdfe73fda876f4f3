"""`decodegrid generate`: prompts from arguments, a file or standard input; text on the screen.

Owns where prompts come from and how several outputs share one screen: the first unfinished prompt
streams, the later ones are held until their turn. Text comes in whole characters from the LLM.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.cli_input import STANDARD_INPUT, decode_utf8
from decodegrid.engine.cli_logprobs import logprob_lines
from decodegrid.engine.cli_options import (
    add_config_options,
    add_grammar_options,
    add_package_option,
    add_sampling_options,
    add_trace_option,
    grammar_from_options,
    load_from_options,
    sampling_from_options,
)
from decodegrid.engine.grid_trace import check_trace_target, save_trace
from decodegrid.engine.llm import LLM
from decodegrid.engine.prompt_check import check_prompts
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.request_output import RequestOutput, StreamOutput

_HEADING_WIDTH = 60


def add_generate_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "generate",
        help="continue prompts",
        description="Continue prompts given as arguments, in a file, or on standard input (the "
        "whole of it is one prompt).",
        allow_abbrev=False,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    parser.add_argument(
        "--prompts-file", type=Path, metavar="FILE", help="one prompt a line; empty lines skipped"
    )
    add_config_options(parser)
    add_package_option(parser)
    add_sampling_options(parser)
    add_grammar_options(parser)
    add_trace_option(parser)
    for name, what in (("logprobs", "token"), ("prompt-logprobs", "token of the prompt")):
        parser.add_argument(
            f"--{name}",
            type=int,
            metavar="N",
            help=f"print the log-probability of each {what} and of the N most probable ones "
            "(0 to 20) behind the text",
        )
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    loaded = load_from_options(args)
    params = replace(
        sampling_from_options(args, loaded),
        logprobs=args.logprobs,
        prompt_logprobs=args.prompt_logprobs,
        structured_outputs=grammar_from_options(args),
    )
    prompts = _read_prompts(args)
    check_prompts(loaded, prompts, params)  # before the start-up, which takes a while
    check_trace_target(args.trace)
    llm = build_llm(loaded)
    try:
        _print_outputs(llm.stream(prompts, params), prompts)
    finally:
        if not args.no_report and llm.stats.num_decode_steps:
            for report in (llm.start_up_report, llm.report()):
                print(report, file=sys.stderr)
        note = save_trace(llm.stats.grid, args.trace, "decodegrid generate")
        if note and not args.no_report:
            print(note, file=sys.stderr)
    return 0


def _read_prompts(args: argparse.Namespace) -> list[str]:
    """Raises RequestError when there is none, OSError or ValueError for the file."""
    if args.prompts and args.prompts_file is not None:
        raise RequestError("prompts are given as arguments and in --prompts-file; choose one")
    if args.prompts_file is not None:
        text = decode_utf8(str(args.prompts_file), args.prompts_file.read_bytes())
        # Not splitlines: a prompt may hold the line ends of Unicode, such as U+2028.
        lines = [line.removesuffix("\r") for line in text.split("\n")]
        prompts = [line for line in lines if line.strip()]
        if not prompts:
            raise RequestError(f"{args.prompts_file}: no prompt in it")
        return prompts
    if args.prompts:
        for index, prompt in enumerate(args.prompts):
            if not prompt:
                where = f"prompt {index}: " if len(args.prompts) > 1 else ""
                raise RequestError(f"{where}the prompt is empty; it needs at least 1 character")
        return list(args.prompts)
    if sys.stdin.isatty():
        raise RequestError("no prompt: give one as an argument, in --prompts-file, or on stdin")
    prompt = decode_utf8(STANDARD_INPUT, sys.stdin.buffer.read()).removesuffix("\n")
    if not prompt:
        raise RequestError(f"{STANDARD_INPUT}: the prompt is empty")
    return [prompt]


def _print_outputs(pieces: Iterable[StreamOutput], prompts: list[str]) -> None:
    """Print the text of prompt 0 as it comes, then that of prompt 1, and so on.

    Raises ValueError, when all have ended, if the engine failed one.
    """
    held: list[list[str]] = [[] for _ in prompts]
    results: list[RequestOutput | None] = [None] * len(prompts)
    current = 0
    _print_heading(current, prompts)
    for piece in pieces:
        held[piece.index].append(piece.text)
        results[piece.index] = piece.output
        while current < len(prompts):
            _write("".join(held[current]))
            held[current].clear()
            result = results[current]
            if result is None:
                break
            _write("\n")
            _write("".join(f"{line}\n" for line in logprob_lines(result)))
            current += 1
            _print_heading(current, prompts)
    for index, result in enumerate(results):
        if result is not None and result.outputs[0].error is not None:
            where = f"prompt {index}: " if len(prompts) > 1 else ""
            raise ValueError(f"{where}{result.outputs[0].error}")


def _print_heading(index: int, prompts: list[str]) -> None:
    """Name the prompt whose text follows, if there is more than one."""
    if len(prompts) == 1 or index >= len(prompts):
        return
    start = " ".join(prompts[index].split())
    if len(start) > _HEADING_WIDTH:
        start = start[: _HEADING_WIDTH - 3] + "..."
    _write(f"{chr(10) if index else ''}== {index + 1}/{len(prompts)}: {start}\n")


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
