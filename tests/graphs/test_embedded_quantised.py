"""The embedded model in the released format: its size, and one model in every way to hold it."""

import torch
from tokenizers import Tokenizer

from decodegrid.configs.load import CONFIGS_DIR, load_config
from decodegrid.graphs.checkpoint import load_model
from decodegrid.graphs.checkpoint_survey import survey_checkpoint

DIRECTORY = CONFIGS_DIR / "tiny-v41"
TEXT = "Once upon a time there was a small fox who lived near the river and liked to sing."


def token_ids() -> torch.Tensor:
    ids = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json")).encode(TEXT * 8).ids
    return torch.tensor(ids)


def test_it_is_small_and_whole() -> None:
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= 16_000_000
    survey = survey_checkpoint(DIRECTORY)
    assert survey.config.quantized
    loaded = load_config(CONFIGS_DIR / "tiny-v41.yaml")
    assert loaded.checkpoint_dir == DIRECTORY
    assert loaded.config.cache.kv_cache == "v41"


def test_packed_and_expanded_are_one_model_and_records_change_little() -> None:
    ids = token_ids()
    assert len(ids) > 130  # beyond the window, so that compressed entries count
    expanded = load_model("tiny-v41")
    logits = expanded.logits(ids)
    assert torch.equal(load_model(DIRECTORY, weights="packed").logits(ids), logits)
    recorded = expanded.logits(ids, kv_cache="v41")
    assert not torch.equal(recorded, logits)
    assert float((recorded.argmax(-1) == logits.argmax(-1)).float().mean()) >= 0.97
    loss = torch.nn.functional.cross_entropy(recorded[:-1], ids[1:])
    assert float(loss) < 0.6 * torch.tensor(float(expanded.config.vocab_size)).log()
