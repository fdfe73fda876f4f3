"""Muon for matrices and AdamW for the rest, over named parameters.

Owns the update rules and their state. Does not own the learning-rate schedule. Muon: momentum,
then an approximate orthogonalisation by three quintic steps in bfloat16, scaled to the size of an
Adam step; stacked experts are orthogonalised one by one.

Source: Muon (Jordan et al. 2024) with the scale of Moonlight (Liu et al. 2025).
"""

from typing import Any

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 3
"""Five are usual; three cost less and bring all but the smallest singular values near 1."""
PRODUCTS = {"float32": "highest", "bfloat16": "medium"}
"""How float32 matrices are multiplied -> torch's name for it. In bfloat16 a CPU that has units for
it multiplies about four times as fast; sums stay float32."""
_ADAM_LEAVES = ("q_weight", "k_weight")


def uses_muon(name: str, parameter: Tensor) -> bool:
    """Matrices, except embeddings, tables, heads, routers, mixers and single-row projections."""
    leaf = name.rsplit(".", 1)[-1]
    outside = ("embed.weight", "gate.weight", "weights_proj.weight")
    if parameter.dim() < 2 or leaf in _ADAM_LEAVES or leaf.startswith("hc_"):
        return False
    return not (name.endswith(outside) or "head" in name)


def orthogonalise(matrices: Tensor) -> Tensor:
    """(N, rows, columns) -> nearly orthonormal rows or columns of each."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.transpose(-1, -2) if tall else matrices
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(torch.bfloat16)
    for _ in range(_STEPS):
        gram = x @ x.transpose(-1, -2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.to(matrices.dtype)
    return x.transpose(-1, -2) if tall else x


class Muon:
    """Muon over parameters grouped by matrix shape, so that one product serves a group."""

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        *,
        momentum: float = 0.95,
        decay: float = 0.1,
    ) -> None:
        self.momentum, self.decay = momentum, decay
        self.groups: dict[tuple[int, int], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            shape = (parameter.shape[-2], parameter.shape[-1])
            key = (min(shape), max(shape))
            self.groups.setdefault(key, []).append((name, parameter))
        self.buffers = {name: torch.zeros_like(parameter) for name, parameter in named}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update of every parameter that has a gradient."""
        for (_, longest), members in self.groups.items():
            live = [(n, p) for n, p in members if p.grad is not None]
            if not live:
                continue
            updates = []
            for name, parameter in live:
                assert parameter.grad is not None
                buffer = self.buffers[name].mul_(self.momentum).add_(parameter.grad)
                update = parameter.grad.add(buffer, alpha=self.momentum)
                update = update.reshape(-1, *update.shape[-2:])
                updates.append(_wide(update))
            sizes = [len(update) for update in updates]
            whole = orthogonalise(torch.cat(updates))
            for (_, parameter), part in zip(live, whole.split(sizes), strict=True):
                if parameter.shape[-2] > parameter.shape[-1]:
                    part = part.transpose(-1, -2)
                parameter.mul_(1.0 - rate * self.decay)
                parameter.add_(part.reshape(parameter.shape), alpha=-0.2 * rate * longest**0.5)

    def state_dict(self) -> dict[str, Tensor]:
        """Momentum by parameter name."""
        return self.buffers

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over momentum; names must be the same."""
        for name, buffer in self.buffers.items():
            buffer.copy_(state[name])


def _wide(update: Tensor) -> Tensor:
    return update.transpose(-1, -2) if update.shape[-2] > update.shape[-1] else update


class Optimizer:
    """Both rules over a model's trainable parameters."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], rates: tuple[float, float]) -> None:
        """`rates`: peak learning rates of Muon and AdamW."""
        self.rates = rates
        matrices = [(n, p) for n, p in named if uses_muon(n, p)]
        rest = [(n, p) for n, p in named if not uses_muon(n, p)]
        self.names = ([n for n, _ in matrices], [n for n, _ in rest])
        self.parameters = [p for _, p in named]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            [p for _, p in rest],
            lr=rates[1],
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.0,
            fused=True,
        )

    def step(self, factor: float, max_norm: float) -> float:
        """Clip, update with `factor` of the peak rates, drop the gradients; returns the norm."""
        norm = float(nn.utils.clip_grad_norm_(self.parameters, max_norm))
        self.muon.step(self.rates[0] * factor)
        self.adam.param_groups[0]["lr"] = self.rates[1] * factor
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
