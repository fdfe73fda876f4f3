"""The last fit of the confidence head on data whose answer is known."""

import torch

from training.fit_confidence import fit


def test_fit_finds_the_weights_and_corrects_an_optimist() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4000, 6, generator=generator) * torch.tensor([9.0, 1, 1, 0.1, 1, 1])
    inputs[:, 1] = 1.0
    truth = torch.tensor([[0.1, -0.5, 0.7, 3.0, 0.0, -0.4]])
    accepted = (inputs @ truth.t()).sigmoid().squeeze(-1)
    start = truth + torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    assert float((inputs @ start.t()).sigmoid().mean() - accepted.mean()) > 0.15
    found = fit(start, inputs, accepted)
    assert found.shape == truth.shape
    predicted = (inputs @ found.t()).sigmoid().squeeze(-1)
    assert float((predicted - accepted).abs().max()) < 0.02
