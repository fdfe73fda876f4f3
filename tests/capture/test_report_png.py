"""The image files: which there are, and that they show what the profile says."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from decodegrid.capture import report_libraries, report_png
from decodegrid.capture.profile_document import Profile
from decodegrid.capture.report_png import write_plots

MakeProfile = Callable[..., Profile]


def size_of(path: Path) -> tuple[int, int]:
    """Width and height, from the file's header."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR"
    assert data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_every_drawing_is_written(make_profile: MakeProfile, tmp_path: Path) -> None:
    paths = write_plots(make_profile(), tmp_path / "new" / "plots")
    assert [path.name for path in paths] == [
        "surface-256.png",
        "staircases-256.png",
        "surface-1024.png",
        "staircases-1024.png",
        "start_up.png",
        "graph_cost.png",
        "acceptance.png",
    ]
    for path in paths:
        width, height = size_of(path)
        assert width > 400 and height > 150


def test_what_is_not_there_is_left_out(make_profile: MakeProfile, tmp_path: Path) -> None:
    profile = make_profile(contexts=(256,), num_drafts=0, live=None, graphs=[], start_up=[])
    paths = write_plots(profile, tmp_path)
    assert [path.name for path in paths] == ["surface-256.png", "staircases-256.png"]
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_drawings_show_the_numbers(make_profile: MakeProfile) -> None:
    profile = make_profile()
    (heat,) = report_png._surface(profile.surfaces[0]).axes[:1]
    # 5 + 256/256 + 0.3 B + 0.9 Q ms
    assert [text.get_text() for text in heat.texts][:5] == ["7.2", "8.1", "9", "9.9", "8.4"]
    assert heat.texts[-1].get_text() == "21.6"
    figure = report_png._staircases(profile, profile.surfaces[0])
    assert figure is not None
    (stairs,) = figure.axes
    lines = [line for line in stairs.lines if line.get_drawstyle() == "steps-pre"]
    assert [line.get_label() for line in lines] == ["1", "2", "4"]
    assert list(lines[1].get_xdata()) == [2, 2, 4, 6, 8]
    assert list(lines[1].get_ydata()) == pytest.approx([8.4, 8.4, 10.2, 12.0, 13.8])
    assert profile.live is not None
    (bars,) = report_png._acceptance(profile.live).axes
    heights = [bar.get_height() for bar in bars.patches]
    assert heights == pytest.approx([80.0, 100 * 320 / 410, 75.0, 80.0, 100 * 320 / 450, 60.0])


def test_one_pair_and_names_with_formulas(make_profile: MakeProfile, tmp_path: Path) -> None:
    """A name is no formula: one that is no valid formula either would stop the drawing."""
    name = "a $\\frac{ graph$ \\undefined $"
    one = {
        "context_len": 8,
        "measured_at": 1.0,
        "pairs": [
            {
                "num_reqs": 1,
                "num_query_tokens": 1,
                "median_ms": 9.0,
                "low_ms": 8.0,
                "high_ms": 9.5,
                "repeats": 3,
            }
        ],
    }
    clean = make_profile()
    profile = make_profile(
        max_num_reqs=1,
        num_drafts=0,
        surfaces=[one],
        live=None,
        graphs=[{**clean.graphs[0].model_dump(), "graph": name}],
        start_up=[{"name": name, "count": 1, "seconds": 0.0}],
    )
    assert len(write_plots(profile, tmp_path)) == 4


def test_pairs_that_are_no_grid_have_no_staircases(
    make_profile: MakeProfile, tmp_path: Path
) -> None:
    pairs = make_profile().surfaces[0].model_dump()
    pairs["pairs"] = pairs["pairs"][:3]
    paths = write_plots(make_profile(surfaces=[pairs]), tmp_path)
    assert [path.name for path in paths][:2] == ["surface-256.png", "start_up.png"]


def test_missing_library_and_bad_directory(
    make_profile: MakeProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("here")
    with pytest.raises(FileExistsError):
        write_plots(make_profile(), file)
    monkeypatch.setattr(report_libraries, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'decodegrid\[report\]'"):
        write_plots(make_profile(), tmp_path / "plots")
    assert not (tmp_path / "plots").exists()
