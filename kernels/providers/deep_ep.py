"""Exchange of tokens between ranks that hold different experts: DeepEP, or nothing for one rank.

Owns the two calls around the experts' products and what they hand over. With one rank both are the
identity, which is also what other ranks' results are compared with. With several, the library's
elastic buffer moves the tokens; its host never waits, so outputs have the size of the worst case
and the calls can be captured. Never imports the library: the buffer is made from the probed module,
before any capture.

Data flow: tokens, expert ids, weights -> rows of this rank's experts -> results -> tokens.

Source: DeepEP 2.1, sgl-deep-ep 0.1.2.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from decodegrid.kernels.providers.wrapper import expect, expect_that


@dataclass(frozen=True, slots=True)
class Received:
    """Tokens that came for this rank's experts."""

    x: Tensor
    """(R, D)."""
    ids: Tensor
    """(R, k) int64, -1 for an expert of another rank."""
    weights: Tensor
    """(R, k) fp32."""
    handle: Any
    """What `combine` needs; opaque."""


class ExpertExchange(Protocol):
    """Both calls; a step makes them in pairs."""

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Received:
        """x: (T, D); ids: (T, k) int64, -1 for none; weights: (T, k) fp32."""
        ...

    def combine(self, results: Tensor, received: Received) -> Tensor:
        """(R, D) results, weighted already -> (T, D), summed over the ranks."""
        ...


class OneRank:
    """The exchange of a single rank: what goes in comes out, the same tensors."""

    __slots__ = ()

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Received:
        """The arguments themselves."""
        _check(x, ids, weights)
        return Received(x, ids, weights, None)

    def combine(self, results: Tensor, received: Received) -> Tensor:
        """The results themselves."""
        expect("combine", "results", results, received.x.dtype, tuple(received.x.shape))
        return results


class ElasticExchange:
    """DeepEP's buffer for one group of ranks.

    Args:
        module: the probed library.
        group: torch.distributed process group of more than one rank.
        num_experts: of all ranks.
        max_tokens: of a rank in one step.
    """

    __slots__ = ("_buffer", "_max_tokens", "_num_experts")

    def __init__(
        self, module: ModuleType, group: Any, num_experts: int, max_tokens: int, hidden: int,
        top_k: int,
    ) -> None:  # fmt: skip
        expect_that(group.size() > 1, "dispatch", "one rank needs no exchange (OneRank)")
        self._num_experts, self._max_tokens = num_experts, max_tokens
        self._buffer = module.ElasticBuffer(
            group,
            num_max_tokens_per_rank=max_tokens,
            hidden=hidden,
            num_topk=top_k,
            use_fp8_dispatch=False,
            explicitly_destroy=True,
        )

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Received:
        """Send every token to the ranks of its experts."""
        _check(x, ids, weights)
        rows, got_ids, got_weights, handle, _ = self._buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_experts=self._num_experts,
            num_max_tokens_per_rank=self._max_tokens,
            do_cpu_sync=False,
        )
        return Received(rows, got_ids, got_weights, handle)

    def combine(self, results: Tensor, received: Received) -> Tensor:
        """Bring the results back and add them up."""
        expect("combine", "results", results, torch.bfloat16, tuple(received.x.shape))
        out: Tensor = self._buffer.combine(results, handle=received.handle)[0]
        return out

    def close(self) -> None:
        """Give the buffer back; the exchange cannot be used afterwards."""
        self._buffer.destroy()


def make_exchange(
    module: ModuleType | None,
    group: Any,
    num_experts: int,
    max_tokens: int,
    hidden: int,
    top_k: int,
) -> ExpertExchange:
    """The exchange of a group; None is one rank. Raises ValueError for several ranks without the
    library."""
    if group is None or group.size() == 1:
        return OneRank()
    if module is None:
        raise ValueError(f"{group.size()} ranks exchange tokens, but deep_ep is not ready")
    return ElasticExchange(module, group, num_experts, max_tokens, hidden, top_k)


def _check(x: Tensor, ids: Tensor, weights: Tensor) -> None:
    op = "dispatch"
    expect(op, "x", x, (torch.bfloat16, torch.float32, torch.float64), (None, None))
    expect(op, "ids", ids, torch.int64, (x.shape[0], None))
    expect(op, "weights", weights, (torch.float32, torch.float64), tuple(ids.shape))
