"""Toy regions, the one inductor compiler and the made-up profile that the capture tests share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from decodegrid.capture.backend import Step
from decodegrid.capture.compile import Region, RegionCompiler
from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.grid import build_grid
from decodegrid.capture.lowering import Backend, CompileOptions
from decodegrid.capture.profile_document import Profile

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


def _timing(median_ms: float) -> dict[str, Any]:
    return {
        "median_ms": median_ms, "low_ms": median_ms * 0.9, "high_ms": median_ms * 1.2, "repeats": 5,
    }


def _surface(max_num_reqs: int, num_drafts: int, context_len: int) -> dict[str, Any]:
    """All pairs of the default grid; 5 ms, 0.3 more a row, 0.9 more a token, more with context."""
    pairs = [
        {
            "num_reqs": key.num_reqs,
            "num_query_tokens": key.num_query_tokens,
            **_timing(
                5.0 + context_len / 256 + 0.3 * key.num_reqs + 0.9 * key.num_query_tokens
            ),
        }
        for key in build_grid(max_num_reqs, num_drafts).keys
    ]
    return {"context_len": context_len, "measured_at": 1.8e9, "pairs": pairs}


def _graph(name: str, variant: str, num_reqs: int, tokens: int, replay: float | None) -> Any:
    return {
        "graph": name, "variant": variant, "num_reqs": num_reqs, "num_query_tokens": tokens,
        "capture_s": 0.01 * tokens, "num_nodes": 130,
        "nodes_by_kind": {"region": 120, "opaque": 10},
        "kernels": {"cpp_fused_add_0": 24, "extern mm": 12}, "pool_bytes": tokens << 20,
        "unseen_bytes": 3 << 18, "replay_ms": replay, "bytes_moved": 40_000_000,
        "flops": 20_000_000 * tokens, "roofline_ms": None if replay is None else replay / 4,
    }


def _live(num_drafts: int) -> dict[str, Any]:
    steps = range(num_drafts)
    return {
        "num_requests": 6, "num_decode_steps": 200, "num_emitted": 900, "decode_seconds": 3.0,
        "graph_seconds": 2.5, "pad_row_share": 0.125, "surplus_token_share": 0.05,
        "positions": {
            "drafted": [600 for _ in steps], "offered": [590 for _ in steps],
            "verified": [500 - 50 * k for k in steps], "reached": [500 - 90 * k for k in steps],
            "accepted": [400 - 80 * k for k in steps],
        },
        "hits": [
            {"num_reqs": 4, "num_query_tokens": 12, "replays": 150, "pad_rows": 60,
             "surplus_tokens": 90},
            {"num_reqs": 1, "num_query_tokens": 2, "replays": 50, "pad_rows": 0,
             "surplus_tokens": 7},
        ],
    }


@pytest.fixture(scope="session")
def make_profile() -> Callable[..., Profile]:
    """make_profile(max_num_reqs=4, num_drafts=3, contexts=(256, 1024), **changes): a profile of the
    default grid with every part, as JSON would bring it; `changes` replace fields."""

    def make(
        max_num_reqs: int = 4,
        num_drafts: int = 3,
        contexts: tuple[int, ...] = (256, 1024),
        **changes: Any,
    ) -> Profile:
        document = {
            "command": ["decodegrid", "profile", "--config", "a deployment.yaml"],
            "measured_at": 1.8e9,
            "machine": {"processor": "A processor", "cores": "2", "threads": "1"},
            "versions": {"decodegrid": "0.1.0", "torch": "2.13.0"},
            "config_sha256": "0123456789abcdef" * 4,
            "max_num_reqs": max_num_reqs,
            "num_draft_tokens": num_drafts,
            "num_compilations": 14,
            "num_loaded": 14,
            "num_captured": 26,
            "start_up": [
                {"name": "import torch", "count": 1, "seconds": 1.5},
                {"name": "read weights", "count": 2, "seconds": 0.25},
                {"name": "capture", "count": 26, "seconds": 2.0},
                {"name": "other", "count": 0, "seconds": 0.25},
            ],
            "surfaces": [_surface(max_num_reqs, num_drafts, length) for length in contexts],
            "prefill": [
                {"num_tokens": tokens, "context_len": length, **_timing(3.0 + 0.2 * tokens)}
                for length in (0, 1024)
                for tokens in (16, 64, 256)
            ],
            "graphs": [
                _graph("(1, 1) fused", "fused", 1, 1, 6.2),
                _graph("(4, 16) fused", "fused", 4, 16, 21.6),
                _graph("(4, 16) rich", "rich", 4, 16, None),
                _graph("prefill 64", "prefill", 0, 64, 15.8),
            ],
            "regions": [
                {"region": "mix", "variants": 2, "compile_s": 3.5, "num_loaded": 0,
                 "kernels": ["cpp_fused_add_0"]},
            ],
            "peaks": {"read_bytes_per_s": 1.2e10, "flops_per_s": 6.5e10, "num_threads": 1},
            "live": _live(num_drafts),
        }
        return Profile.model_validate({**document, **changes})

    return make
