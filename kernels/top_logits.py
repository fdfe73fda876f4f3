"""The most probable tokens of a row of logits, in an order that does not depend on the device.

Owns the op `decodegrid::top_logits`: the largest logits of the rows that want them, descending,
the lower id first among equal ones. It stays one opaque op: rows that do not want it cost nothing
on the CPU, and compilers sort badly.
"""

import torch
from torch import Tensor

LIBRARY = torch.library.Library("decodegrid", "FRAGMENT")
LIBRARY.define("top_logits(Tensor logits, Tensor wanted, int count) -> (Tensor, Tensor)")


def top_logits(logits: Tensor, wanted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and ids of the `count` largest logits of each row.

    logits: (N, vocab) fp32 or fp64; wanted: (N,) bool. Returns (N, count) in the logits' dtype and
    (N, count) int64; -inf and -1 behind the end of a smaller vocabulary, and in rows that do not
    want them. Rows with NaN give arbitrary ids. The native kernel gives the same bits.
    """
    vocab = logits.shape[-1]
    kept = min(count, vocab)
    threshold = logits.topk(kept).values[:, -1:]
    # All above the threshold, and of those equal to it the lowest ids.
    id_order = torch.arange(vocab, 0, -1, device=logits.device)
    priority = id_order * (logits == threshold) + (vocab + id_order) * (logits > threshold)
    ids = priority.topk(kept).indices.sort(-1).values
    values, order = logits.gather(-1, ids).sort(stable=True, descending=True)
    missing = ~wanted.unsqueeze(-1)
    values = values.masked_fill(missing, float("-inf"))
    ids = ids.gather(-1, order).masked_fill(missing, -1)
    pad = (0, count - kept)
    return (
        torch.nn.functional.pad(values, pad, value=float("-inf")),
        torch.nn.functional.pad(ids, pad, value=-1),
    )


def _fake(logits: Tensor, wanted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], count)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


# Not the CPU key: that one is for the native kernel, which then wins.
LIBRARY.impl("top_logits", top_logits, "CompositeExplicitAutograd")
torch.library.register_fake("decodegrid::top_logits", _fake, lib=LIBRARY)

top_logits_op = torch.ops.decodegrid.top_logits.default
"""The op form, which every step uses."""
