"""Text that copies, names planted far back, and the comparison of repeated runs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from decodegrid.graphs.drafter import DraftModel
from training.copies import SHARES, copy_documents
from training.data import is_heldout
from training.fast_forward import FastForward
from training.long_range import Planted, filler_sentences, name_probability, plant
from training.repeat import compare
from training.vocabulary import Vocabulary

MakeModel = Callable[..., DraftModel]


def test_copied_answers_stand_in_their_questions() -> None:
    vocabulary = Vocabulary.from_file()
    documents = list(copy_documents(vocabulary, 6000))
    assert documents == list(copy_documents(vocabulary, 6000))
    sizes = dict.fromkeys(SHARES, 0)
    answers = copied = 0
    for document in documents:
        sizes[document.domain] += len(document.ids)
        text = vocabulary.decode(list(document.ids))
        if document.domain == "chats":
            for pair in text.split("<\uff5cUser\uff5c>")[1:]:
                assert not is_heldout(pair.split("<\uff5cAssistant\uff5c>")[0])
        if document.domain != "planted":
            for place, answer in enumerate(document.answers):
                answers += answer
                copied += answer and document.ids[place] in document.ids[:place]
    assert copied / answers > 0.6
    assert min(sizes[kind] / (6000 * share) for kind, share in SHARES.items()) > 0.6


def test_planted_names_come_back_with_their_animals() -> None:
    vocabulary = Vocabulary.from_file()
    planted = [d for d in copy_documents(vocabulary, 12000) if d.domain == "planted"]
    assert planted
    for document in planted:
        text = vocabulary.decode(list(document.ids))
        names = dict(re.findall(r"there was a little (\w+) named (\w+)\.", text, re.IGNORECASE))
        again = re.findall(r"\n\nThe (\w+) was a little \1 named (\w+)\.", text)
        again += re.findall(r" The name of the (\w+) was (\w+)\.", text)
        again += [(a, n) for n, a in re.findall(r' "My name is (\w+)," said the (\w+)\.', text)]
        assert again and all(names[animal] == name for animal, name in again)
        assert {animal for animal, _ in again} == set(names)


def test_the_name_is_planted_once_and_asked_for_at_the_end() -> None:
    vocabulary, fillers = Vocabulary.from_file(), filler_sentences(heldout=True)
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
