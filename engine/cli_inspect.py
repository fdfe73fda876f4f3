"""`decodegrid inspect`: what a checkpoint directory holds, from config.json and headers alone.

Owns what is printed, as text or JSON, and the cards that the sizes are compared with. Exit status 0
for a checkpoint without findings, 1 with them; an error where there is nothing to compare.

Data flow: directory -> survey, parameter counts and cache sizes -> one plain report -> lines.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.llm import LLM
from decodegrid.engine.terminal_text import printable

if TYPE_CHECKING:
    from decodegrid.graphs.checkpoint_survey import Survey

CARDS = (("H100 80 GB", 80), ("H200 141 GB", 141), ("B200 180 GB", 180))
"""Memory of one card in 10^9 bytes, as NVIDIA's data sheets give it: H100 SXM, H200 SXM, and B200
as in HGX and DGX B200 (1,440 GB in eight)."""

USED_SHARE = 0.9
"""Share of a card's memory that weights and cache may take."""

EXIT_FINDINGS = 1

_DRAFTER = "drafter"
_NOTES = {
    "whole": "",
    "headers only": "no tensor data behind the headers: shapes and dtypes are known, values not",
    "index only": "no tensor file is here: names come from the index, shapes and dtypes are "
    "assumed from config.json",
}


def add_inspect_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "inspect",
        help="say what a checkpoint holds, lacks and needs",
        description="Read config.json and the headers of the tensor files, and print layers, "
        "parameters, bytes, what is missing or does not fit, cache sizes, and the cards that are "
        "needed. Exit status 1 when something is missing or does not fit.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", metavar="DIR", help='checkpoint directory, or "tiny"')
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_inspect)


def _inspect(args: argparse.Namespace, build_llm: Callable[[LoadedConfig], LLM]) -> int:
    # Imported here: the other commands check their arguments before torch is loaded.
    from decodegrid.graphs.checkpoint import checkpoint_path
    from decodegrid.graphs.checkpoint_survey import survey_checkpoint

    survey = survey_checkpoint(checkpoint_path(args.directory))
    report = make_report(survey)
    print(json.dumps(report, indent=1) if args.json else "\n".join(format_report(report)))
    return EXIT_FINDINGS if survey.findings else 0


def make_report(survey: "Survey") -> dict[str, Any]:
    """Everything that is printed, as JSON values; bytes and counts are exact."""
    from decodegrid.graphs.checkpoint_inventory import PARTS, count_parameters

    sums, counts = survey.sums, count_parameters(survey.config, survey.vision)
    caches = _caches(survey)
    return {
        "directory": str(survey.directory),
        "name": _name(survey.raw),
        "quantized": survey.config.quantized,
        "num_files": survey.num_files,
        "num_tensors": survey.num_tensors,
        "data": survey.data,
        "present_bytes": survey.present_bytes,
        "weight_bytes": sums.total,
        "bytes_by_dtype": dict(sorted(sums.by_dtype.items())),
        "elements_by_dtype": dict(sorted(sums.elements.items())),
        "bytes_by_part": {part: sums.by_part[part] for part in PARTS if part in sums.by_part},
        "layers": _layers(survey),
        "parameters": {name: getattr(counts, name) for name in type(counts).__slots__},
        "caches": caches,
        "cards": _cards(sums.total, sums.by_part.get("engram tables", 0), caches),
        "findings": [
            {"what": found.what, "count": found.count, "examples": list(found.examples)}
            for found in survey.findings
        ],
    }


def _name(raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    first = names[0] if isinstance(names, list) and names else raw["model_type"]
    return f"{first} ({raw['model_type']})"


def _layers(survey: "Survey") -> dict[str, Any]:
    from decodegrid.graphs.layer_kinds import layers_by_kind

    config = survey.config
    kinds = {kind.value: layers for kind, layers in layers_by_kind(config).items() if layers}
    if config.num_nextn_predict_layers:
        kinds[_DRAFTER] = list(range(config.num_nextn_predict_layers))
    return {"kinds": kinds, "candidate_source": config.candidate_source_layer_id}


def _caches(survey: "Survey") -> list[dict[str, Any]]:
    """Sizes of both formats, with all the drafts that the model's drafter can make."""
    import torch

    from decodegrid.graphs.cache_sizes import cache_sizes
    from decodegrid.graphs.kv_cache import KvCache

    config = survey.config
    drafts = config.dspark_block_size if config.num_nextn_predict_layers else 0
    formats: tuple[KvCache, ...] = ("compute", "v41")
    found: list[dict[str, Any]] = []
    for kv_cache in formats:
        try:
            sizes = cache_sizes(config, kv_cache, torch.bfloat16, drafts)
        except ValueError as error:
            found.append({"kv_cache": kv_cache, "error": str(error)})
            continue
        found.append(
            {
                "kv_cache": kv_cache,
                "dtype": "bfloat16" if kv_cache == "compute" else "records",
                "num_draft_tokens": drafts,
                "bytes_per_token": sizes.token,
                "bytes_per_request": sizes.request,
                "persisted_bytes": sizes.persisted,
            }
        )
    return found


def _cards(
    weight_bytes: int, table_bytes: int, caches: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Cards for the weights alone, and the tokens that fit beside them, by the smallest records."""
    smallest = [cache for cache in caches if "error" not in cache][-1]
    places = [("device", weight_bytes)]
    if table_bytes:
        places.append(("host", weight_bytes - table_bytes))
    found = []
    for name, gigabytes in CARDS:
        room = int(USED_SHARE * gigabytes * 10**9)
        for place, needed in places:
            count = max(1, math.ceil(needed / room))
            left = count * room - needed
            per_token = smallest["bytes_per_token"]
            found.append(
                {
                    "card": name,
                    "engram_tables": place,
                    "weight_bytes": needed,
                    "cards": count,
                    "cache_tokens": int(left / per_token) if per_token else None,
                    "kv_cache": smallest["kv_cache"],
                }
            )
    return found


def format_report(report: dict[str, Any]) -> Iterator[str]:
    """The report of `make_report` as lines of text."""
    stored = "quantised weights" if report["quantized"] else "float weights"
    yield printable(f"{report['directory']}: {report['name']}, {stored}")
    yield (
        f"{_count(report['num_files'], 'file')}, {report['num_tensors']:,} tensors, "
        f"{report['weight_bytes']:,} bytes ({_gigabytes(report['weight_bytes'])})"
    )
    if _NOTES[report["data"]]:
        yield f"note: {_NOTES[report['data']]}"
    yield from _format_findings(report["findings"])
    yield from _format_layers(report["layers"])
    yield from _format_parameters(report["parameters"])
    for title, key in (("dtype", "bytes_by_dtype"), ("part", "bytes_by_part")):
        yield f"\nbytes by {title}"
        for name, value in report[key].items():
            yield f"  {name:<26} {value:>19,}"
    yield from _format_caches(report["caches"])
    yield from _format_cards(report["cards"])


def _format_findings(findings: list[dict[str, Any]]) -> Iterator[str]:
    if not findings:
        yield "every tensor that config.json asks for is there, with its shape and dtype"
    for found in findings:
        shown = "; ".join(found["examples"])
        more = found["count"] - len(found["examples"])
        rest = f"; {more:,} more" if more else ""
        yield printable(f"! {found['what']}: {found['count']:,} ({shown}{rest})")


def _format_layers(layers: dict[str, Any]) -> Iterator[str]:
    yield "\nlayers"
    for kind, ids in layers["kinds"].items():
        prefix = "mtp." if kind == _DRAFTER else ""
        note = ""
        if layers["candidate_source"] in ids and kind == "full source":
            note = f" ({layers['candidate_source']} names the candidate blocks)"
        yield f"  {kind:<26} {len(ids):>4}  {prefix}{_ranges(ids)}{note}"


def _format_parameters(counts: dict[str, int]) -> Iterator[str]:
    words = {
        "total": "all weights",
        "experts": "routed experts",
        "engram": "engram tables",
        "drafter": "drafter",
        "vision": "image path",
        "active": "active for a token",
    }
    yield "\nparameters by config.json (scales not counted)"
    for name, value in counts.items():
        if value == 0:  # a part that this model does not have
            continue
        yield f"  {words[name]:<26} {value:>19,}  {_billions(value)}"
    yield "  active: what a decoded token visits in the target, the head included, no drafter"


def _format_caches(caches: list[dict[str, Any]]) -> Iterator[str]:
    yield "\ncache"
    for cache in caches:
        if "error" in cache:
            yield f"  {cache['kv_cache']:<8} not for this model: {cache['error']}"
            continue
        per_token = f"{cache['bytes_per_token']:,.1f}".removesuffix(".0")
        yield (
            f"  {cache['kv_cache']:<8} {'(' + cache['dtype'] + ')':<11} {per_token:>10} bytes "
            f"a token, {cache['bytes_per_request']:,} a request with "
            f"{cache['num_draft_tokens']} drafts, {cache['persisted_bytes']:,} of it for a prefix "
            "store"
        )


def _format_cards(cards: list[dict[str, Any]]) -> Iterator[str]:
    kind = cards[0]["kv_cache"]
    yield f"\ncards for the weights as stored, and tokens of {kind} cache beside them"
    for card in cards:
        tables = "" if card["engram_tables"] == "device" else ", engram tables in host memory"
        tokens = card["cache_tokens"]
        room = "no paged cache" if tokens is None else f"{tokens:,} tokens"
        yield f"  {card['cards']:>3} x {card['card']:<12} {room}{tables}"
    yield (
        f"  assumed: {USED_SHARE:.0%} of each card's memory (data sheet, 10^9 bytes) for weights "
        "and cache, split evenly"
    )
    yield "  with no copy; activations and captured graphs in the rest; state of requests not taken"
    yield "  off. This says what fits: decodegrid itself runs on one device."


def _ranges(ids: list[int]) -> str:
    """[3, 4, 5, 9] as "3-5, 9"."""
    spans: list[list[int]] = []
    for value in ids:
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _gigabytes(value: int) -> str:
    return f"{value / 10**9:,.1f} GB" if value >= 10**8 else f"{value / 10**6:,.1f} MB"


def _billions(value: int) -> str:
    return f"{value / 10**9:,.1f} B" if value >= 10**8 else f"{value / 10**6:,.2f} M"
