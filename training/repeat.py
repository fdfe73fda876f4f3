"""Checks that training repeats: `python -m training.repeat`, run twice.

Owns the comparison. Each call trains a fresh target for a few steps and writes the losses, with the
hashes of the data and the versions they hold for, to build/training/repeat.json; a call that finds
a file of the same data and versions compares its losses bit for bit and fails where one differs.
"""

import argparse
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from decodegrid.graphs.engram_vocab import compressed_token_classes
from training.fast_forward import Compiler
from training.run_log import BUILD, compile_piece
from training.schedule import Plan
from training.tiny_config import TOKENIZER, tiny_config
from training.train_target import TargetTrainer

LEG_TOKENS = 2_000_000
"""Length of the leg whose first steps are repeated."""


def circumstances(data: Path) -> dict[str, str]:
    """What equal losses are promised for."""
    hashes = {
        name: hashlib.sha256((data / name).read_bytes()).hexdigest()
        for name in ("train.npy", "train_answers.npy")
    }
    return hashes | {"torch": torch.__version__, "machine": platform.processor()}


def first_losses(data: Path, steps: int, compiler: Compiler | None) -> list[float]:
    """Losses of the first steps of a run from scratch on the text under `data`."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    trainer = TargetTrainer(
        tiny_config(tokenizer),
        compressed_token_classes(tokenizer),
        {"train": np.load(data / "train.npy")},
        Plan(),
        compiler,
        np.load(data / "train_answers.npy"),
    )
    trainer.progress.begin_leg(LEG_TOKENS)
    return [trainer.train_step()["loss"] for _ in range(steps)]


def compare(found: dict[str, Any], path: Path) -> str:
    """Write `found` to `path` if nothing comparable is there; else say that the losses are equal.

    Raises ValueError naming the first step whose loss is another.
    """
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if earlier["circumstances"] == found["circumstances"]:
            pairs = zip(earlier["losses"], found["losses"], strict=False)
            for step, (old, new) in enumerate(pairs, start=1):
                if old != new:
                    raise ValueError(f"{path}: the loss of step {step} was {old!r}, is {new!r}")
            count = min(len(earlier["losses"]), len(found["losses"]))
            return f"the first {count} losses are those of {path}"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return f"wrote {len(found['losses'])} losses to {path}"


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Compare the first losses of two runs.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--data", type=Path, default=BUILD)
    parser.add_argument("--output", type=Path, default=BUILD / "repeat.json")
    parser.add_argument("--eager", action="store_true", help="without compiled pieces")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    compiler = None if arguments.eager else compile_piece
    losses = first_losses(arguments.data, arguments.steps, compiler)
    found = {"circumstances": circumstances(arguments.data), "losses": losses}
    print(" ".join(f"{loss:.5f}" for loss in losses))
    print(compare(found, arguments.output))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
