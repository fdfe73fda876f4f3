"""Writes text with the embedded model: `python -m training.sample --prompt "..."`.

Owns a look at a checkpoint during training: the uncached forward, one token at a time. The engine
is the way to serve it.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer

from decodegrid.graphs.checkpoint import load_model
from decodegrid.graphs.model import Model
from training.run_log import ROOT


def generate(
    model: Model, ids: list[int], num_tokens: int, temperature: float, seed: int
) -> list[int]:
    """Up to `num_tokens` new ids after `ids`, ending early at the end-of-sentence token;
    temperature 0 is greedy."""
    generator = torch.Generator().manual_seed(seed)
    out = list(ids)
    for _ in range(num_tokens):
        logits = model.logits(torch.tensor(out))[-1]
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(
                torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            )
        out.append(token)
        if token == model.config.eos_token_id:
            break
    return out[len(ids) :]


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Sample from the embedded model.")
    parser.add_argument("--model", type=Path, default=ROOT / "configs" / "tiny")
    parser.add_argument("--prompt", action="append", required=True)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(arguments.model)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    for prompt in arguments.prompt:
        ids = [model.config.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False).ids]
        new = generate(model, ids, arguments.tokens, arguments.temperature, arguments.seed)
        print(prompt, "|", tokenizer.decode(new, skip_special_tokens=False), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
