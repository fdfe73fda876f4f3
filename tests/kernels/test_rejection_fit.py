"""Goodness of fit of whole rounds on a small vocabulary: what is emitted is the target's own text.

Target and drafter are Markov tables over 8 tokens, far apart; the confidence of a draft depends on
the token before it, so that verify lengths know the drafts. Many thousands of batches of two rows
run several rounds through the functions that the step runs, and triples of emitted tokens are
compared with their exact probabilities. Budgets that look at the fresh confidences, and noise that
is used again, must be caught by the same comparison.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from decodegrid.kernels import rejection
from decodegrid.kernels.rejection import TokenSampling, draw_draft, verify_rejection
from decodegrid.kernels.sampling import Purpose, choose_scaled, stream_counter
from decodegrid.kernels.verify import accept_prefix, split_verify_lengths, survival

VOCAB, DRAFTS, ROWS, BATCHES, FIRST, ROUNDS = 8, 3, 2, 20_000, 3, 4
PLAIN, FILTERED = (1.0, 1.0, -1), (0.7, 0.85, 5)
LIMIT = 3.72
"""Standard deviations of a normal that are exceeded once in 10000."""

Budget = Callable[[Tensor, Tensor], Tensor]
"""(confidences of the last round, those of this one), (N, B, K) each -> (N,) query tokens."""


def table(seed: int) -> Tensor:
    """Logits of the next token after each token, (8, 8)."""
    generator = torch.Generator().manual_seed(seed)
    return 1.2 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)


TARGET, DRAFTER = table(1), table(2)


def from_old(old: Tensor, fresh: Tensor) -> Tensor:
    """All drafts or none, whichever promises more tokens a millisecond on a surface of two pairs,
    1 ms and 2.5 ms; by the drafts of a round ago, which are history by now."""
    promised = ROWS + survival(old).sum((1, 2))
    return torch.where(promised / 2.5 > ROWS / 1.0, ROWS * (DRAFTS + 1), ROWS)


def from_fresh(old: Tensor, fresh: Tensor) -> Tensor:
    """The same rule on the drafts that are about to be verified."""
    return from_old(fresh, old)


def from_old_tail(old: Tensor, fresh: Tensor) -> Tensor:
    """All drafts or none, by the last confidence that the first row had a round ago: it knows a
    draft that was never verified where the round ended before it."""
    return torch.where(old[:, 0, -1] > 0.5, ROWS * (DRAFTS + 1), ROWS)


def everything(old: Tensor, fresh: Tensor) -> Tensor:
    return torch.full(old.shape[:1], ROWS * (DRAFTS + 1))


def confidences(drafts: Tensor) -> Tensor:
    """The first draft is always likely; each later one only after an even token: (R, K)."""
    later = torch.where(drafts[:, :-1] % 2 == 0, 0.95, 0.1).double()
    return torch.cat((torch.full_like(later[:, :1], 0.8), later), 1)


def draft_block(
    coupled: bool, anchor: Tensor, lengths: Tensor, sampling: TokenSampling
) -> tuple[Tensor, Tensor]:
    """K drafts of every row and what they were drawn from: (R, K), (R, K, vocab)."""
    tokens, log_probs, previous = [], [], anchor
    for step in range(DRAFTS):
        logits = DRAFTER[previous]
        previous, drawn_from = draw_draft(logits, sampling, lengths + step, torch.tensor([step]))
        if coupled:
            scaled = sampling.filter(logits)
            previous = choose_scaled(scaled, sampling[0], sampling.seed, lengths + step)
        tokens.append(previous)
        log_probs.append(drawn_from)
    return torch.stack(tokens, 1), torch.stack(log_probs, 1)


def verify_lengths(budget: Budget, old: Tensor, fresh: Tensor) -> Tensor:
    """Query tokens of every row, split over the two rows of each batch as the step splits them."""
    grouped = [part.reshape(BATCHES, ROWS, DRAFTS) for part in (old, fresh)]
    limits = torch.full((BATCHES, ROWS), DRAFTS)
    live = torch.ones(BATCHES, ROWS, dtype=torch.bool)
    split = torch.vmap(split_verify_lengths)
    return split(survival(grouped[1]), limits, live, budget(*grouped).unsqueeze(1)).flatten()


def play(budget: Budget, settings: tuple[float, float, int], coupled: bool = False) -> Tensor:
    """The texts of all rows after some rounds, (rows, ROUNDS + 1) int64, the first token given."""
    rows = BATCHES * ROWS
    temperature, top_p, top_k = (torch.tensor(value).expand(rows) for value in settings)
    min_p = torch.zeros(rows, dtype=torch.float64)
    sampling = TokenSampling(
        temperature.double(), top_p.double(), top_k, min_p, torch.arange(rows)
    )
    texts = torch.full((rows, 1 + ROUNDS * (DRAFTS + 1)), -1)
    texts[:, 0] = FIRST
    lengths = torch.ones(rows, dtype=torch.int64)
    old = torch.full((rows, DRAFTS), 0.8, dtype=torch.float64)
    for _ in range(ROUNDS):
        anchor = texts.gather(1, lengths.unsqueeze(1) - 1).squeeze(1)
        drafts, log_probs = draft_block(coupled, anchor, lengths, sampling)
        fresh = confidences(drafts)
        lens = verify_lengths(budget, old, fresh)
        starts = lens.cumsum(0) - lens
        row = torch.repeat_interleave(lens)
        offset = torch.arange(len(row)) - starts[row]
        fed = torch.cat((anchor.unsqueeze(1), drafts), 1)[row, offset]
        positions, after = lengths[row] - 1 + offset, offset.clamp(max=DRAFTS - 1)
        logits, asked = TARGET[fed], sampling.at(row)
        if coupled:
            chosen = choose_scaled(asked.filter(logits), asked[0], asked.seed, positions + 1)
            index = (starts.unsqueeze(1) + torch.arange(DRAFTS + 1)).clamp(max=len(row) - 1)
            token_ids = chosen[index]
            accepted = accept_prefix(token_ids, drafts, lens)
        else:
            token_ids, accepted, _ = verify_rejection(
                logits, log_probs[row, after], drafts[row, after], positions, asked, starts, lens,
                DRAFTS,
            )
        for column in range(DRAFTS + 1):
            live = (column <= accepted).nonzero().squeeze(1)
            texts[live, lengths[live] + column] = token_ids[live, column]
        lengths += accepted + 1
        old = fresh
    return texts[:, : ROUNDS + 1]


def exact_table(settings: tuple[float, float, int]) -> np.ndarray:
    """Next-token probabilities of the target after temperature and filters, by the definition."""
    temperature, top_p, top_k = settings
    rows = []
    for logits in TARGET.numpy():
        full = np.exp(logits / temperature)
        full /= full.sum()
        order = sorted(range(VOCAB), key=lambda i: (-full[i], i))
        kept = [i for r, i in enumerate(order) if r == 0 or full[order[:r]].sum() <= top_p]
        kept = kept if top_k < 0 else kept[:top_k]
        rows.append([full[i] / full[kept].sum() if i in kept else 0.0 for i in range(VOCAB)])
    return np.array(rows)


def misfit(texts: Tensor, settings: tuple[float, float, int], first: int) -> float:
    """How far the triples at first .. first + 2 are from their distribution, in standard
    deviations of the normal that chi-square is close to (Wilson-Hilferty)."""
    step = exact_table(settings)
    start = np.linalg.matrix_power(step, first)[FIRST]
    wanted = np.einsum("a,ab,bc->abc", start, step, step).ravel() * len(texts)
    a, b, c = texts[:, first : first + 3].unbind(1)
    found = torch.bincount((a * VOCAB + b) * VOCAB + c, minlength=VOCAB**3).numpy()
    if found[wanted == 0].any():
        return np.inf
    rare = wanted < 8
    found = np.append(found[~rare], found[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    df = len(wanted) - 1
    assert df > 25
    ratio = ((found - wanted) ** 2 / wanted).sum() / df
    return float((np.cbrt(ratio) - (1 - 2 / (9 * df))) / np.sqrt(2 / (9 * df)))


@pytest.mark.parametrize("settings", [PLAIN, FILTERED])
@pytest.mark.parametrize("budget", [from_old, from_old_tail, everything])
def test_rejection_emits_the_target(budget: Budget, settings: tuple[float, float, int]) -> None:
    texts = play(budget, settings)
    for part in (texts, texts[::ROWS]):
        assert misfit(part, settings, 1) < LIMIT
        assert misfit(part, settings, 2) < LIMIT
    # The comparison sees a temperature that is off by a tenth.
    other = (settings[0] * 1.1, *settings[1:])
    assert misfit(texts, other, 1) > LIMIT


@pytest.mark.parametrize("settings", [PLAIN, FILTERED])
def test_a_budget_from_fresh_confidences_is_caught(settings: tuple[float, float, int]) -> None:
    assert misfit(play(from_fresh, settings), settings, 1) > 3 * LIMIT


def test_draft_noise_that_comes_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise by position alone ties a draft to the round before, and so to the budget."""

    def forgetful(position: Tensor, purpose: Purpose, index: Tensor | int = 0) -> Tensor:
        return stream_counter(position, purpose)

    monkeypatch.setattr(rejection, "stream_counter", forgetful)
    assert misfit(play(from_old_tail, PLAIN)[::ROWS], PLAIN, 1) > 2 * LIMIT


def test_a_wrong_residual_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Final tokens drawn from the whole target, as if the rejected draft had told nothing."""

    def whole(log_target: Tensor, log_draft: Tensor, offered: Tensor) -> Tensor:
        return log_target.exp()

    monkeypatch.setattr(rejection, "residual", whole)
    assert misfit(play(everything, PLAIN), PLAIN, 1) > 3 * LIMIT


@pytest.mark.parametrize("budget", [from_old, from_fresh])
def test_coupled_emits_the_target_under_any_budget(budget: Budget) -> None:
    texts = play(budget, FILTERED, coupled=True)
    assert misfit(texts, FILTERED, 1) < LIMIT
    assert misfit(texts, FILTERED, 2) < LIMIT
    assert torch.equal(texts, play(everything, FILTERED, coupled=True))
