"""Min-p, top-p and top-k: which tokens of a distribution a request may draw.

Owns the op `decodegrid::filter_logits`: the temperature, then the filters over one stable order,
descending by probability, ties by token id. Does not draw. It stays one opaque op: its work depends
on values, and rows without a filter cost the division alone. Data flow: logits and a request's
parameters per row -> scaled logits, removed tokens at -inf.

Source: DeepInfer's sampler (top-p on the tempered full distribution, then top-k); min-p before
both, as in vLLM's sampler.
"""

import torch
from torch import Tensor

from decodegrid.kernels.sampling import scale_logits

LIBRARY = torch.library.Library("decodegrid", "FRAGMENT")
LIBRARY.define(
    "filter_logits(Tensor logits, Tensor temperature, Tensor top_p, Tensor top_k, Tensor min_p)"
    " -> Tensor"
)


def filter_logits(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor
) -> Tensor:
    """Scaled logits of every row, -inf for the tokens that its filters remove.

    A token is removed if its probability is below min_p times the first one's, if the mass strictly
    before it exceeds top_p of what min_p leaves, or if top_k tokens stand before it. The first
    token always survives.

    logits: (N, vocab) fp32 or fp64; temperature: (N,), 0 leaves the row as it is; top_p: (N,)
    float, 1 or more is off; top_k: (N,) int64, below 1 or at least vocab is off; min_p: (N,) float,
    0 or less is off. Returns (N, vocab) contiguous, the logits' dtype; masses are summed in fp64.
    The native kernel keeps the same tokens.
    """
    vocab = logits.shape[-1]
    scaled = scale_logits(logits, temperature).to(logits.dtype).contiguous()
    by_mass, by_count, by_peak = top_p < 1, (top_k > 0) & (top_k < vocab), min_p > 0
    filtered = (temperature > 0) & (by_mass | by_count | by_peak)
    # Another device takes all rows: picking some would make the host wait for it.
    rows = filtered.nonzero().squeeze(1) if logits.device.type == "cpu" else slice(None)
    part = scaled[rows]
    if part.shape[0] == 0:
        return scaled
    ordered, order = part.sort(stable=True, dim=-1, descending=True)
    below_peak = ordered.double() - ordered[:, :1].double()
    mass = below_peak.exp().cumsum(-1)
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), 1)
    rank = torch.arange(vocab, device=logits.device)
    lowest = min_p[rows].double().clamp(max=1.0).log().unsqueeze(-1)
    removed = by_peak[rows].unsqueeze(-1) & (below_peak < lowest)
    last = vocab - 1 - removed.sum(-1, keepdim=True)
    allowed = top_p[rows].double().unsqueeze(-1) * mass.gather(-1, last)
    removed |= by_mass[rows].unsqueeze(-1) & (before > allowed)
    removed |= by_count[rows].unsqueeze(-1) & (rank >= top_k[rows].unsqueeze(-1))
    removed &= filtered[rows].unsqueeze(-1) & (rank > 0)
    removed = torch.empty_like(removed).scatter_(1, order, removed)
    scaled[rows] = part.masked_fill(removed, float("-inf"))
    return scaled


def _fake(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor
) -> Tensor:
    return logits.new_empty(logits.shape)


# Not the CPU key: that one is for the native kernel, which then wins.
LIBRARY.impl("filter_logits", filter_logits, "CompositeExplicitAutograd")
torch.library.register_fake("decodegrid::filter_logits", _fake, lib=LIBRARY)

filter_logits_op = torch.ops.decodegrid.filter_logits.default
"""The op form, which every step uses."""
