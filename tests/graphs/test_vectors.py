"""Published numbers of the Engram hash and of YaRN, reproduced exactly."""

from collections.abc import Callable

import pytest
import torch

from decodegrid.graphs.attention import layer_frequencies
from decodegrid.graphs.drafter import DraftModel
from decodegrid.graphs.model_config import ModelConfig
from decodegrid.kernels.engram import hash_multipliers, hash_rows, table_primes
from decodegrid.kernels.norm_rope import rope_frequencies

RELEASE_CLASSES = 99092
RELEASE_IDS = [5, 17, 99091, 0, 1234]
PAD = 2
RELEASE_MULTIPLIERS = {
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
}
RELEASE_PRIMES = {
    1: """16000057 16000079 16000081 16000097 16000121 16000129 16000133 16000183 16000189
        16000207 16000211 16000253 16000277 16000289 16000307 16000321 16000339 16000381 16000393
        16000399 16000403 16000409 16000447 16000463""",
    14: """16000477 16000487 16000499 16000507 16000511 16000573 16000609 16000627 16000667
        16000669 16000693 16000697 16000711 16000729 16000759 16000769 16000781 16000799 16000813
        16000819 16000841 16000877 16000879 16000889""",
}
ROWS_1 = """5993266 29589612 33207019 62252675 74175613 88911241 96296787 125612980 131681981
    154296021 162293956 184502087 204984057 221090330 228580886 240489356 259631670 276380225
    301389470 307359744 333216700 340815690 358301264 373179655"""
ROWS_14 = """6158710 22715435 42669689 56024757 78718470 87795701 101960096 117359866 135254616
    154401123 167820625 176767577 195179020 214502492 237742077 245072139 266552410 279044112
    303154629 305819048 333825711 339855774 365126039 380945871"""
YARN_RELEASE = """1 0.687656022 0.472870805 0.325172456 0.223606798 0.153764561 0.105737126
    0.0727107717 0.05 0.0343828011 0.0236435402 0.0162586228 0.0111803399 0.00768822805
    0.00528685632 0.00363553858 0.002265625 0.00139680129 0.000849689727 0.000508081963
    0.000296977778 0.000168179989 9.0867843e-05 4.54442323e-05 1.953125e-05 5.37231267e-06
    3.69430316e-06 2.54040981e-06 1.74692811e-06 1.20128563e-06 8.260713e-07 5.68052904e-07"""
YARN_TINY = "1 0.167705098 0.025 0.00279508497 0.000625 0.000139754249 3.125e-05 6.98771243e-06"


def ints(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def release_rows(layer: int, lookback: list[int]) -> list[int]:
    primes = table_primes(2, 24, 16_000_000)[0 if layer == 1 else 1]
    rows = torch.tensor(primes)
    multipliers = hash_multipliers(layer, RELEASE_CLASSES, 4)
    return hash_rows(
        torch.tensor(lookback), torch.tensor(multipliers), rows, rows.cumsum(0) - rows, 8
    ).tolist()


def test_release_primes() -> None:
    first, second = table_primes(2, 24, 16_000_000)
    assert first == ints(RELEASE_PRIMES[1]) and sum(first) == 384006168
    assert second == ints(RELEASE_PRIMES[14]) and sum(second) == 384016682


@pytest.mark.parametrize("layer", [1, 14])
def test_release_multipliers(layer: int) -> None:
    assert hash_multipliers(layer, RELEASE_CLASSES, 4) == RELEASE_MULTIPLIERS[layer]


def test_release_hash() -> None:
    newest_first = RELEASE_IDS[::-1]
    assert release_rows(1, newest_first[:4]) == ints(ROWS_1)
    assert release_rows(14, newest_first[:4]) == ints(ROWS_14)
    early = release_rows(1, [17, 5, PAD, PAD])
    assert early[:3] == [4465417, 19956422, 46092342]
    assert early[-2:] == [358228516, 371977877]
    blocked = release_rows(1, [1234, PAD, PAD, PAD])
    assert blocked[:3] == [12881298, 23977112, 42458188]


def test_small_tables_hash_through_the_model(make_model: Callable[..., DraftModel]) -> None:
    """Class map, lookback, multipliers and offsets as a model with 12 layers carries them."""
    model = make_model(
        vocab_size=1024,
        engram_layer_ids=[1, 4],
        engram_num_embeddings=[3144, 3424],
        engram_max_ngram_size=4,
        engram_vocab_size=500,
        engram_compressed_vocab_size=768,
    )
    first, second = model.layers[1].engram, model.layers[4].engram
    assert first.primes.tolist() == [503, 509, 521, 523, 541, 547]
    assert second.primes.tolist() == [557, 563, 569, 571, 577, 587]
    assert first.multipliers.tolist() == ints(
        "9887536017466969 624470054477373 4639734178996047 9546293285712273"
    )
    assert second.multipliers.tolist() == ints(
        "10613710397603751 650006363476367 9503213677773539 2445670937787327"
    )
    lookback = model.lookback(torch.tensor([[0, 15, 900, 31, 7]]))[0]
    rows = hash_rows(lookback, first.multipliers, first.primes, first.offsets, 2)
    assert rows[0].tolist() == [351, 660, 1502, 1846, 2248, 2807]
    assert rows[1].tolist() == [40, 947, 1230, 2025, 2303, 2769]
    assert rows[4].tolist() == [480, 710, 1062, 1869, 2567, 2794]


def test_yarn_release() -> None:
    found = rope_frequencies(64, 160000.0, yarn_factor=16.0, original_max_positions=65536)
    wanted = torch.tensor([float(word) for word in YARN_RELEASE.split()], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=0)
    plain = rope_frequencies(64, 160000.0)
    assert torch.equal(found[:16], plain[:16]), "the ramp starts above pair 15"
    assert torch.equal(found[25:], plain[25:] / 16), "the ramp ends at pair 25"
    assert (found[16:25] != plain[16:25]).all() and (found[16:25] != plain[16:25] / 16).all()


def test_yarn_tiny_layers(tiny_config: ModelConfig) -> None:
    wanted = torch.tensor([float(word) for word in YARN_TINY.split()], dtype=torch.float64)
    for layer in range(2, 12):
        found = layer_frequencies(tiny_config, layer)
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=0)
    plain = torch.tensor([10000.0 ** (-i / 8) for i in range(8)], dtype=torch.float64)
    for layer in (0, 1, 12, 13, 14):
        torch.testing.assert_close(layer_frequencies(tiny_config, layer), plain)
