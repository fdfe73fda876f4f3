"""Text that copies, names planted far back, and the comparison of repeated runs."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from decodegrid.graphs.drafter import DraftModel
from training.copies import copy_documents
from training.data import is_heldout
from training.fast_forward import FastForward
from training.long_range import Planted, filler_sentences, name_probability, plant
from training.repeat import compare
from training.vocabulary import Vocabulary

MakeModel = Callable[..., DraftModel]


def test_copied_answers_stand_in_their_questions() -> None:
    vocabulary = Vocabulary.from_file()
    documents = list(copy_documents(vocabulary, 3000))
    assert documents == list(copy_documents(vocabulary, 3000))
    answers = copied = 0
    for document in documents:
        text = vocabulary.decode(list(document.ids))
        for pair in text.split("<\uff5cUser\uff5c>")[1:]:
            question = pair.split("<\uff5cAssistant\uff5c>")[0]
            assert not is_heldout(question)
        for place, (token, answer) in enumerate(zip(document.ids, document.answers, strict=True)):
            answers += answer
            copied += answer and token in document.ids[:place]
    assert copied / answers > 0.6


def test_the_name_is_planted_once_and_asked_for_at_the_end() -> None:
    vocabulary, fillers = Vocabulary.from_file(), filler_sentences()
    assert len(fillers) > 200
    text = plant(vocabulary, Random(3), fillers, 150)
    name = text.ids[-text.name_tokens :]
    places = [
        start
        for start in range(len(text.ids))
        if text.ids[start : start + text.name_tokens] == name
    ]
    assert len(places) == 2
    assert places[1] - places[0] - text.name_tokens == text.gap
    assert 138 <= text.gap < 260


def test_probability_is_the_models_and_windows_alone_differ(make_model: MakeModel) -> None:
    model = make_model(6)
    fast = FastForward(model)
    ids = tuple(int(i) for i in torch.randint(3, 90, (29,), generator=torch.Generator()))
    text = Planted(ids, name_tokens=2, gap=20)
    probs = model.logits(torch.tensor(ids)).softmax(-1)
    expected = float(probs[26, ids[27]] * probs[27, ids[28]])
    assert name_probability(fast, text, windows_only=False) == pytest.approx(expected, rel=1e-6)
    alone = name_probability(fast, text, windows_only=True)
    assert alone != pytest.approx(expected, rel=1e-6)


def test_repeated_losses_are_compared_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "repeat.json"
    found = {"circumstances": {"torch": "x"}, "losses": [3.0, 2.5]}
    assert compare(found, path) == f"wrote 2 losses to {path}"
    assert compare(found, path) == f"the first 2 losses are those of {path}"
    other = {"circumstances": {"torch": "x"}, "losses": [3.0, 2.5 + 2**-40]}
    with pytest.raises(ValueError, match="step 2"):
        compare(other, path)
    assert compare(other | {"circumstances": {"torch": "y"}}, path).startswith("wrote")
    assert json.loads(path.read_text(encoding="utf-8"))["circumstances"] == {"torch": "y"}
