"""Options that several subcommands share, and what they mean.

Owns --config, --set and the sampling flags. A flag that is not given leaves the deployment's value.
"""

import argparse
from pathlib import Path

from decodegrid.configs.load import LoadedConfig, load_config
from decodegrid.engine.sampling_params import SamplingParams


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
    parser.add_argument("--seed", type=int, metavar="N", help="default: a new one each time")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of text")
    parser.add_argument(
        "--no-report", action="store_true", help="no closing report on standard error"
    )


def load_from_options(args: argparse.Namespace) -> LoadedConfig:
    """Raises ConfigError."""
    return load_config(args.config, args.overrides)


def sampling_from_options(args: argparse.Namespace, loaded: LoadedConfig) -> SamplingParams:
    """Raises RequestError."""
    defaults = loaded.config.sampling
    return SamplingParams(
        temperature=defaults.temperature if args.temperature is None else args.temperature,
        max_tokens=defaults.max_tokens if args.max_tokens is None else args.max_tokens,
        seed=args.seed,
        top_p=defaults.top_p if args.top_p is None else args.top_p,
        top_k=defaults.top_k if args.top_k is None else args.top_k,
        ignore_eos=args.ignore_eos,
    )
