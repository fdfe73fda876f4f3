"""The costs that a plan is bounded by, taken from a profile.

Owns which part of the ledger a pair's cost is made of. Data flow: `Profile` -> the file that
`decodegrid.capture.plan_costs` reads.
"""

import json

from decodegrid.capture.grid import GraphKey
from decodegrid.capture.plan_costs import PairCost
from decodegrid.capture.profile_document import Profile, ProfileError


def pair_costs(profile: Profile) -> dict[GraphKey, PairCost]:
    """Memory and capture time of each captured pair, all its variants together.

    Memory is the growth of the allocator's pool and what grew beside it. Raises ProfileError for a
    ledger without a pair.
    """
    found: dict[GraphKey, PairCost] = {}
    for graph in profile.graphs:
        if graph.variant not in ("fused", "rich"):
            continue
        key = GraphKey(graph.num_reqs, graph.num_query_tokens)
        other = found.get(key, PairCost(0.0, 0.0))
        found[key] = PairCost(
            other.memory_bytes + graph.pool_bytes + graph.unseen_bytes,
            other.capture_s + graph.capture_s,
        )
    if not found:
        raise ProfileError("the profile has no captured pair; its ledger is empty")
    return dict(sorted(found.items()))


def costs_text(profile: Profile) -> str:
    """The file's content as JSON text with a line end."""
    pairs = [
        {
            "num_reqs": key.num_reqs,
            "num_query_tokens": key.num_query_tokens,
            "memory_bytes": cost.memory_bytes,
            "capture_s": cost.capture_s,
        }
        for key, cost in pair_costs(profile).items()
    ]
    return json.dumps({"format": 1, "pairs": pairs}, indent=1, allow_nan=False) + "\n"
