"""What quantised weights and cache records cost a model: `python -m benchmarks.stored_forms`.

Converts a float checkpoint to the released format, and prints the change per kind of tensor, the
bytes of both, and the loss on held-out text of three forms: floats, quantised weights, and
quantised weights with quantised cache records. All of it counts values; nothing is timed. Held-out
documents are those that the embedded model's training leaves out; another checkpoint must have
the embedded tokenizer.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.machine import describe_machine
from benchmarks.results import save_json
from decodegrid.graphs.checkpoint import checkpoint_path, load_model
from decodegrid.graphs.checkpoint_convert import KindReport, convert_checkpoint
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.kv_cache import KvCache
from training.data import Document, build_story_documents, build_templated_documents
from training.vocabulary import Vocabulary

TEMPLATED_TOKENS = 400_000
"""Templated text that is made; one document in twenty of it is held out."""
MAX_DOCUMENT_TOKENS = 512

Documents = dict[str, list[tuple[int, ...]]]


def heldout_documents(num_documents: int) -> Documents:
    """Up to `num_documents` held-out documents of each domain, cut to their first 512 tokens."""
    vocabulary = Vocabulary.from_file()

    def take(documents: Iterable[Document]) -> list[tuple[int, ...]]:
        heldout = (document for document in documents if document.heldout)
        return [item.ids[:MAX_DOCUMENT_TOKENS] for item in islice(heldout, num_documents)]

    return {
        "stories": take(build_story_documents(vocabulary)),
        "templated": take(build_templated_documents(vocabulary, TEMPLATED_TOKENS)),
    }


def nats_per_token(
    model: DraftModel, documents: Sequence[tuple[int, ...]], kv_cache: KvCache
) -> float:
    """Mean loss over all tokens but each document's first, by the uncached forward."""
    total, count = 0.0, 0
    for ids in documents:
        tokens = torch.tensor(ids)
        logits = model.logits(tokens[:-1], kv_cache=kv_cache)
        total += float(F.cross_entropy(logits, tokens[1:], reduction="sum"))
        count += len(ids) - 1
    return total / count


def measure(checkpoint: str, num_documents: int) -> dict[str, Any]:
    """Convert, load each form as a user would, and measure; prints as it goes."""
    documents = heldout_documents(num_documents)
    tokens = {name: sum(map(len, found)) for name, found in documents.items()}
    source = checkpoint_path(checkpoint)
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "quantised"
        reports = convert_checkpoint(source, target, "fp8")
        print_reports(reports)
        sizes = {"float": tensor_bytes(source), "quantised": tensor_bytes(target)}
        print(f"\ntensor files: {sizes['float']} bytes, quantised {sizes['quantised']} bytes")
        print(
            "\nheld-out nats a token, " + ", ".join(f"{n} tokens of {d}" for d, n in tokens.items())
        )
        losses: dict[str, dict[str, float]] = {}
        forms: tuple[tuple[str, Path, KvCache], ...] = (
            ("float", source, "compute"),
            ("quantised weights", target, "compute"),
            ("quantised weights, v41 records", target, "v41"),
        )
        for name, directory, kv_cache in forms:
            model = load_model(directory)
            losses[name] = {
                domain: nats_per_token(model, found, kv_cache)
                for domain, found in documents.items()
            }
            print(f"  {name:<32}" + "".join(f"  {d} {x:.4f}" for d, x in losses[name].items()))
    return {
        **describe_machine(),
        "documents": num_documents,
        "tokens": tokens,
        "tensor_bytes": sizes,
        "relative_rms_error": {report.kind: report.relative_rms_error for report in reports},
        "nats_per_token": losses,
    }


def print_reports(reports: Sequence[KindReport]) -> None:
    """One line for each kind of tensor."""
    print(f"{'kind':<12}{'tensors':>9}{'bytes':>12}{'quantised':>12}{'max error':>12}{'rms':>9}")
    for report in reports:
        print(
            f"{report.kind:<12}{report.tensors:>9}{report.bytes_before:>12}"
            f"{report.bytes_after:>12}{report.max_error:>12.3g}{report.relative_rms_error:>9.2%}"
        )


def tensor_bytes(directory: Path) -> int:
    """Bytes of a checkpoint's tensor files."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; 2 for arguments, a checkpoint or a file that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stored_forms", allow_abbrev=False)
    parser.add_argument("--checkpoint", default="tiny", metavar="DIR", help="of floats")
    parser.add_argument("--documents", type=int, default=60, metavar="N", help="of each domain")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    args = parser.parse_args(argv)
    if args.documents < 1:
        parser.error(f"--documents must be at least 1, got {args.documents}")
    try:
        result = measure(args.checkpoint, args.documents)
        save_json(result, args.json)
    except (ValueError, OSError) as error:
        print(f"benchmarks.stored_forms: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
