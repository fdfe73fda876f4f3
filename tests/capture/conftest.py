"""Toy regions and the one inductor compiler that the capture tests share."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from decodegrid.capture.backend import Step
from decodegrid.capture.compile import Region, RegionCompiler
from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.lowering import Backend, CompileOptions

WIDTH = 32
MAX_TOKENS = 48
NUM_SLOTS = 96


def project(
    x: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: list[torch.Tensor],
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Norm, linear and rotation-like product into `out`, and the same rows into tables."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm_weight
    rows = torch.nn.functional.linear(normed, weight) * cos[positions]
    out.copy_(rows)
    for table in tables:
        table.index_put_((slots,), rows)


def combine(x: torch.Tensor, per_req: torch.Tensor, out: torch.Tensor) -> None:
    """Softmax over tokens' features plus a sum over requests; tokens and requests are two sizes."""
    out.copy_(torch.softmax(x, -1) + per_req.sum(0))


@dataclass
class Toy:
    """Two regions, their static buffers, and a step over them for any number of tokens and
    requests."""

    compiler: RegionCompiler
    project: Region
    combine: Region
    x: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tables: list[torch.Tensor]
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    per_req: torch.Tensor
    mid: torch.Tensor
    out: torch.Tensor

    def step(self, num_reqs: int, num_tokens: int) -> Step:
        """A step bound to leading slices of the buffers."""

        def run() -> None:
            t = slice(0, num_tokens)
            mid = self.mid[t]
            self.project(
                self.x[t], self.positions[t], self.slots[t], self.tables, *self.weights, mid
            )
            self.combine(mid, self.per_req[:num_reqs], self.out[t])
            self.combine(self.out[t], self.per_req[:num_reqs], self.mid[t])

        return run

    def refill(self, seed: int) -> None:
        """New contents in all inputs, marked contents in all outputs."""
        generator = torch.Generator().manual_seed(seed)
        self.x.normal_(generator=generator)
        self.per_req.normal_(generator=generator)
        self.slots.copy_(torch.randperm(NUM_SLOTS, generator=generator)[:MAX_TOKENS])
        self.positions.copy_(torch.randint(0, 16, (MAX_TOKENS,), generator=generator))
        for written in self.written():
            written.fill_(-7.0)

    def written(self) -> list[torch.Tensor]:
        """All that a step writes."""
        return [self.mid, self.out, *self.tables]


def make_toy(backend: Backend) -> Toy:
    """A toy on its own compiler."""
    compiler = RegionCompiler(CompileOptions(backend, num_threads=1), CaptureCounters())
    generator = torch.Generator().manual_seed(1)
    weights = (
        torch.nn.Parameter(torch.randn(WIDTH, generator=generator)),
        torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator)),
        torch.randn(16, WIDTH, generator=generator),
    )
    tokens_first = {"x": (0,), "out": (0,)}
    return Toy(
        compiler=compiler,
        project=compiler.region(
            project, {**tokens_first, "positions": (0,), "slots": (0,), "tables": (0,)}
        ),
        combine=compiler.region(combine, {**tokens_first, "per_req": (0,)}),
        x=torch.zeros(MAX_TOKENS, WIDTH),
        positions=torch.zeros(MAX_TOKENS, dtype=torch.int64),
        slots=torch.zeros(MAX_TOKENS, dtype=torch.int64),
        tables=[torch.zeros(NUM_SLOTS, WIDTH), torch.zeros(NUM_SLOTS, WIDTH)],
        weights=weights,
        per_req=torch.zeros(MAX_TOKENS, WIDTH),
        mid=torch.zeros(MAX_TOKENS, WIDTH),
        out=torch.zeros(MAX_TOKENS, WIDTH),
    )


@pytest.fixture(scope="session")
def inductor_toy() -> Toy:
    """The toy compiled by inductor; shared, so tests refill it and never freeze it."""
    return make_toy("inductor")


@pytest.fixture
def toy_of() -> Callable[[Backend], Toy]:
    """Makes a fresh toy; cheap for the backends eager and none."""
    return make_toy


@pytest.fixture
def eager_compiler() -> RegionCompiler:
    """A fresh compiler that traces whole functions and runs torch operators."""
    return RegionCompiler(CompileOptions("eager"), CaptureCounters())
