"""Options that several subcommands share, and what they mean.

Owns --config, --set, --package and the sampling flags. A flag that is not given leaves the
deployment's value.
"""

import argparse
import json
from pathlib import Path

from decodegrid.configs.load import LoadedConfig, load_config
from decodegrid.engine.cli_input import decode_utf8
from decodegrid.engine.grammar_params import StructuredOutputsParams
from decodegrid.engine.sampling_params import SamplingParams

_SHOWN_CHARS = 40


def add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="deployment (default: the embedded model)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="override one value of the deployment, such as scheduler.max_num_reqs=4",
    )


def add_package_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--package",
        metavar="DIR",
        help="start from what decodegrid capture wrote there (default: compile.package, or else "
        "what the cache directory has)",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy (default: the deployment's)"
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="tokens at most (default: the deployment's)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="draw from the most probable tokens that hold this share, above 0 to 1 (all) "
        "(default: the deployment's)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        metavar="N",
        help="draw from the N most probable tokens, -1 for all (default: the deployment's)",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="leave out tokens below this share of the highest probability, 0 to 1",
    )
    for name, meaning in (
        ("presence", "taken from the logit of what the output holds, -2 to 2"),
        ("frequency", "the same, as often as the output holds it"),
    ):
        parser.add_argument(f"--{name}-penalty", type=float, default=0.0, metavar="X", help=meaning)
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="divides the logit of what prompt or output hold; above 1 repeats less",
    )
    parser.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="ID=X",
        help="add X, -100 to 100, to the logit of a token id; may be given again",
    )
    parser.add_argument(
        "--min-tokens", type=int, default=0, metavar="N", help="no end before N tokens are out"
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given again",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="default: a new one each time")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of text")
    parser.add_argument(
        "--no-report", action="store_true", help="no closing report on standard error"
    )


def add_grammar_options(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="text that is JSON after this schema"
    )
    form.add_argument("--regex", metavar="PATTERN", help="text that this expression matches whole")
    form.add_argument(
        "--grammar", type=Path, metavar="FILE", help="text of this EBNF grammar, from its rule root"
    )


def grammar_from_options(args: argparse.Namespace) -> StructuredOutputsParams | None:
    """What the options of add_grammar_options ask for. Raises RequestError, OSError and
    ValueError."""
    if args.json_schema is not None:
        _refuse_text("--json-schema", args.json_schema, "{")
        return StructuredOutputsParams(json=_read_text(args.json_schema))
    if args.grammar is not None:
        _refuse_text("--grammar", args.grammar, "::=")
        return StructuredOutputsParams(grammar=_read_text(args.grammar))
    return None if args.regex is None else StructuredOutputsParams(regex=args.regex)


def add_trace_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the batches of the run there, for decodegrid plan",
    )


def load_from_options(args: argparse.Namespace) -> LoadedConfig:
    """Raises ConfigError, and ValueError for an empty --package."""
    overrides = list(args.overrides)
    package = getattr(args, "package", None)
    if package is not None:
        if not package:
            raise ValueError("--package is empty; it names a directory")
        overrides.append(f"compile.package={json.dumps(package, ensure_ascii=False)}")
    return load_config(args.config, overrides)


def sampling_from_options(args: argparse.Namespace, loaded: LoadedConfig) -> SamplingParams:
    """Raises RequestError."""
    defaults = loaded.config.sampling
    return SamplingParams(
        temperature=defaults.temperature if args.temperature is None else args.temperature,
        max_tokens=defaults.max_tokens if args.max_tokens is None else args.max_tokens,
        seed=args.seed,
        top_p=defaults.top_p if args.top_p is None else args.top_p,
        top_k=defaults.top_k if args.top_k is None else args.top_k,
        min_p=args.min_p,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty,
        logit_bias=dict(args.logit_bias) or None,
        min_tokens=args.min_tokens,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )


def _read_text(path: Path) -> str:
    return decode_utf8(str(path), path.read_bytes())


def _refuse_text(option: str, path: Path, mark: str) -> None:
    """Raise ValueError where something is given that a file would hold.

    mark: stands in such a text, and hardly in a file's name.
    """
    text = str(path)
    try:
        is_file = path.exists()
    except OSError:  # a text may be longer than any name
        is_file = False
    if mark in text and not is_file:
        start = " ".join(text.split())
        shown = start if len(start) <= _SHOWN_CHARS else start[: _SHOWN_CHARS - 3] + "..."
        raise ValueError(f"{option} is {shown!r}; it takes the name of a file that holds the text")


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form ID=X") from None
