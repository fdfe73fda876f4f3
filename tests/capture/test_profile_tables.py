"""Tables, CSV and costs of hand-made profiles, and what becomes of damaged ones."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from decodegrid.capture.grid import GraphKey
from decodegrid.capture.plan_costs import PairCost, read_costs
from decodegrid.capture.profile_costs import costs_text, pair_costs
from decodegrid.capture.profile_csv import FILES, csv_texts, write_csv
from decodegrid.capture.profile_document import Profile, ProfileError, profile_text, read_profile
from decodegrid.capture.profile_tables import format_difference, format_error, format_profile
from decodegrid.capture.surface import Surface, SurfaceError, SurfacePoint
from decodegrid.capture.surface_search import read_surface


def graph(name: str, variant: str, sizes: tuple[int, int], **changes: Any) -> dict[str, Any]:
    return {
        "graph": name,
        "variant": variant,
        "num_reqs": sizes[0],
        "num_query_tokens": sizes[1],
        "capture_s": 0.25,
        "num_nodes": 7,
        "nodes_by_kind": {"region": 5, "opaque": 2},
        "kernels": {"cpp_fused_add_0": 4, "aten::sort": 1},
        "pool_bytes": 2**20,
        "unseen_bytes": 2**19,
        "replay_ms": 8.0,
        "bytes_moved": 3 * 2**20,
        "flops": 5_000_000,
        "roofline_ms": 2.0,
    } | changes


def time_of(**sizes: Any) -> dict[str, Any]:
    return {"median_ms": 8.0, "low_ms": 7.5, "high_ms": 9.0, "repeats": 3, **sizes}


def document() -> dict[str, Any]:
    """A profile of two pairs at two contexts, with one prefill size and a live run."""

    def pairs(scale: float) -> list[dict[str, Any]]:
        ms = {"low_ms": 7.0 * scale, "median_ms": 8.0 * scale, "high_ms": 10.0 * scale}
        return [
            {"num_reqs": 1, "num_query_tokens": 1, "repeats": 3, **ms},
            {"num_reqs": 2, "num_query_tokens": 4, "repeats": 3, **ms, "high_ms": 16.0 * scale},
        ]

    return {
        "format": 1,
        "command": ["decodegrid", "profile"],
        "measured_at": 1.8e9,
        "machine": {"processor": "abacus"},
        "versions": {"torch": "2.13.0"},
        "config_sha256": "0" * 64,
        "max_num_reqs": 2,
        "num_draft_tokens": 1,
        "num_compilations": 3,
        "num_loaded": 1,
        "num_captured": 5,
        "start_up": [
            {"name": "compile moe", "count": 2, "seconds": 1.5},
            {"name": "other", "count": 0, "seconds": 0.5},
        ],
        "surfaces": [
            {"context_len": 256, "measured_at": 1.8e9, "pairs": pairs(1.0)},
            {"context_len": 1024, "measured_at": 1.8e9, "pairs": pairs(2.0)},
        ],
        "prefill": [time_of(num_tokens=64, context_len=256)],
        "graphs": [
            graph("prefill 64", "prefill", (0, 64)),
            graph("(2, 4) fused", "fused", (2, 4)),
            graph("(1, 1) fused", "fused", (1, 1), capture_s=0.125),
            graph("(2, 4) rich", "rich", (2, 4), replay_ms=None, pool_bytes=2**22),
        ],
        "regions": [
            {
                "region": "moe", "variants": 2, "compile_s": 1.5, "num_loaded": 1,
                "kernels": ["aten::sort", "cpp_fused_add_0"],
            },
        ],
        "peaks": {"read_bytes_per_s": 1.25e10, "flops_per_s": 9.87e10, "num_threads": 2},
        "live": {
            "num_requests": 4, "num_decode_steps": 10, "num_emitted": 33, "decode_seconds": 1.25,
            "graph_seconds": 1.0, "pad_row_share": 0.125, "surplus_token_share": 0.25,
            "positions": {
                "drafted": [20], "offered": [18], "verified": [16], "accepted": [8],
                "reached": [16],
            },
            "hits": [
                {
                    "num_reqs": 2, "num_query_tokens": 4, "replays": 10, "pad_rows": 5,
                    "surplus_tokens": 25,
                },
            ],
        },
    }  # fmt: skip


@pytest.fixture
def profile() -> Profile:
    return Profile.model_validate(document())


def line_of(text: str, start: str) -> list[str]:
    """Cells of the one line that begins so."""
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return line.split()


def test_tables(profile: Profile) -> None:
    text = format_profile(profile, ledger=True)
    assert "context 256, measured 2027-01-15T08:00:00+00:00" in text and "context 1024" in text
    assert line_of(text, "64 ") == ["64", "256", "8", "7.5..9", "8000"]
    # Two graphs of 0.25 and 0.125 s, each with 1 MiB in the pool and half of one beside it.
    assert line_of(text, "fused ") == ["fused", "2", "0.375", "2.0", "1.0", "7"]
    assert "3 compilations in 1.50 s, 1 regions from a cache, 5 captured graphs" in text
    assert "12.50 GB/s read, 98.7 GFLOP/s in a matrix product, 2 threads" in text
    cells = line_of(text, "(2, 4) fused")
    assert cells[3:] == [
        "5", "region,", "2", "opaque", "5", "250.0", "1.00", "0.50", "8", "3.000", "5.00", "2",
        "25.0%",
    ]  # fmt: skip
    # Not timed: no time, and no share of the roofline.
    assert line_of(text, "(2, 4) rich")[-5:] == ["-", "3.000", "5.00", "2", "-"]
    assert line_of(text, "moe ") == ["moe", "aten::sort", "2", "2", "1.50", "1"]
    # Ten replays: half a row and two and a half tokens of each were padding.
    assert line_of(text, "(2, 4)  ") == ["(2,", "4)", "10", "0.50", "2.50"]
    assert line_of(text, "1  ")[1:] == ["20", "18", "16", "8", "50.0%", "50.0%"]


def test_tables_of_less(profile: Profile) -> None:
    """Without ledger, live run and peaks there are no such lines."""
    text = format_profile(profile.model_copy(update={"live": None, "peaks": None}))
    assert "live run" not in text and "peaks" not in text and "(2, 4) fused" not in text
    assert line_of(text, "prefill ")[:2] == ["prefill", "1"]


def test_two_measurements_are_compared() -> None:
    """A factor that all pairs share is told apart from what changes their ratios."""

    def surface(*times: float) -> Surface:
        keys = (GraphKey(1, 1), GraphKey(1, 2), GraphKey(1, 3))
        points = {key: SurfacePoint(ms, ms, ms, 1) for key, ms in zip(keys, times, strict=True)}
        return Surface(points, 256, 1.0, {})

    start = "measured again later at context 256: the step times of 3 pairs differ by "
    assert format_difference(surface(10, 10, 20), surface(9, 12, 21)) == (
        f"{start}10.0% in the median and 20.0% at most; beside the factor 1.050 that they share "
        "by 14.3% in the median"
    )
    assert format_difference(surface(10, 20, 30), surface(15, 30, 45)) == (
        f"{start}50.0% in the median and 50.0% at most; beside the factor 1.500 that they share "
        "by 0.0% in the median"
    )
    assert format_error(surface(10, 10, 20), surface(9, 12, 21)) == (
        "measured twice in turns at context 256: the step times of 3 pairs differ by 10.0% in the "
        "median and 20.0% at most"
    )


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_holds_every_field(profile: Profile, tmp_path: Path) -> None:
    data = document()
    texts = csv_texts(profile)
    assert tuple(texts) == FILES
    surface = rows(texts["surface.csv"])
    assert [(row["context_len"], row["num_reqs"], row["median_ms"]) for row in surface] == [
        ("256", "1", "8.0"),
        ("256", "2", "8.0"),
        ("1024", "1", "16.0"),
        ("1024", "2", "16.0"),
    ]
    for name, key in (("graphs", "graphs"), ("regions", "regions"), ("prefill", "prefill")):
        found = rows(texts[f"{name}.csv"])
        assert [set(row) for row in found] == [set(entry) for entry in data[key]]
        for row, entry in zip(found, data[key], strict=True):
            plain = {k: v for k, v in entry.items() if not isinstance(v, (dict, list))}
            assert {k: row[k] for k in plain} == {
                k: "" if v is None else str(v) for k, v in plain.items()
            }
    assert rows(texts["graphs.csv"])[0]["kernels"] == "cpp_fused_add_0=4 aten::sort=1"
    assert rows(texts["regions.csv"])[0]["kernels"] == "aten::sort cpp_fused_add_0"
    assert rows(texts["hits.csv"])[0]["surplus_tokens"] == "25"
    none = csv_texts(profile.model_copy(update={"live": None}))["hits.csv"]
    assert none == "num_reqs,num_query_tokens,replays,pad_rows,surplus_tokens\n"
    directory = tmp_path / "tables"
    for _ in range(2):  # made, then replaced
        written = write_csv(profile, directory)
        assert [path.name for path in written] == sorted(FILES, key=FILES.index)
        assert {path.name for path in directory.iterdir()} == set(FILES)
        assert (directory / "graphs.csv").read_text() == texts["graphs.csv"]


def test_costs_are_what_a_plan_reads(profile: Profile, tmp_path: Path) -> None:
    """Both variants of a pair together, pool and what is beside it; prefill is no pair's."""
    path = tmp_path / "costs.json"
    path.write_text(costs_text(profile))
    half = 2**19
    assert (
        read_costs(path)
        == pair_costs(profile)
        == {
            GraphKey(1, 1): PairCost(2**20 + half, 0.125),
            GraphKey(2, 4): PairCost(2**20 + 2**22 + 2 * half, 0.5),
        }
    )
    with pytest.raises(ProfileError, match="no captured pair"):
        costs_text(profile.model_copy(update={"graphs": profile.graphs[:1]}))


def test_a_profile_is_read_back(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile_text(profile))
    assert read_profile(path) == profile
    # What `plan --surface` is given.
    assert read_surface(path) == profile.surfaces[0].surface()
    assert read_surface(path).ms(GraphKey(2, 4)) == 8.0


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("format",), 2, "format: Input should be 1"),
        (("surfaces",), [], "surfaces: List should have at least 1 item"),
        (("surfaces", 0, "pairs"), [], "needs at least one point"),
        (("surfaces", 0, "pairs", 0, "median_ms"), "8", "surfaces.0.pairs.0.median_ms: Input"),
        (("surfaces", 0, "pairs", 1, "num_query_tokens"), 1, "need 1 <= requests <= query tokens"),
        (("surfaces", 0, "pairs", 0, "median_ms"), 70.0, "low <= median <= high"),
        (("surfaces", 0, "measured_at"), -1.0, "need seconds since 1970"),
        (("graphs", 0, "variant"), "other", "graphs.0.variant: Input should be 'fused'"),
        (("graphs", 0, "pool_bytes"), -1, "graphs.0.pool_bytes: Input should be greater than"),
        (("more",), 1, "more: Extra inputs are not permitted"),
    ],
)
def test_a_damaged_profile_is_named(
    where: tuple[Any, ...], value: object, message: str, tmp_path: Path
) -> None:
    data: Any = document()
    place = data
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = value
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)
    with pytest.raises(SurfaceError, match=r"profile\.json: "):
        read_surface(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON at line 1"),
        (b"{", "not JSON at line 1"),
        (b"\xff\xfe", "byte 0 is not UTF-8 text"),
        (b"[]", "the file: Input should be"),
        (b'{"format": NaN}', "NaN is no JSON number"),
    ],
)
def test_what_is_no_profile(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)
