"""The step-time surface: measuring over a callable, the table, the file, and the store."""

import errno
import json
import os
from pathlib import Path

import pytest

from decodegrid.capture.grid import GraphKey, Grid, build_grid
from decodegrid.capture.surface import (
    StepProbe,
    Surface,
    SurfaceError,
    SurfacePoint,
    measure_surface,
    measure_twice,
)
from decodegrid.capture.surface_store import SurfaceStore

FACTS = {"model": "abc", "torch": "2.13", "device": "cpu"}
KEYS = build_grid(2, 1).keys
DAY = 86400.0


def make_surface(measured_at: float = 1000.0, keys=KEYS, facts=None, context_len=64, scale=1.0):
    points = {
        key: SurfacePoint(scale * key.num_query_tokens, scale * 0.5, scale * 10.0, 5)
        for key in keys
    }
    return Surface(points, context_len, measured_at, FACTS if facts is None else facts)


def load(store: SurfaceStore, keys=KEYS, facts=None, context_len=64, max_age_s=DAY, now=1500.0):
    return store.load(
        keys,
        context_len=context_len,
        facts=FACTS if facts is None else facts,
        max_age_s=max_age_s,
        now=now,
    )


class Machine:
    """A clock that only runs, preparations and waits move on, with a log of what was called."""

    def __init__(self, ms_of) -> None:
        self.ms_of = ms_of
        self.seconds = 50.0
        self.log: list[str] = []
        self.pending = 0.0

    def prepare(self, key: GraphKey) -> None:
        self.log.append(f"prepare {key}")
        self.seconds += 100.0

    def run(self, key: GraphKey) -> None:
        self.log.append(f"run {key}")
        self.pending = self.ms_of(key, self.log.count(f"run {key}")) / 1e3

    def synchronize(self) -> None:
        self.seconds += self.pending
        self.pending = 0.0

    def probe(self) -> StepProbe:
        return StepProbe(self.run, self.prepare, self.synchronize)


def test_measurement_times_the_run_alone_and_drops_the_warm_up():
    """Run i of (B, Q) takes 100 Q + B, and i more for one pair, so each statistic is known."""
    noisy = GraphKey(1, 2)
    machine = Machine(
        lambda key, i: 100 * key.num_query_tokens + key.num_reqs + (i if key == noisy else 0)
    )
    surface = measure_surface(
        KEYS,
        machine.probe(),
        context_len=64,
        facts=FACTS,
        warmup=2,
        repeats=4,
        now=lambda: 77.0,
        clock=lambda: machine.seconds,
    )
    assert surface.context_len == 64 and surface.measured_at == 77.0 and surface.facts == FACTS
    for key in KEYS:
        base = 100 * key.num_query_tokens + key.num_reqs
        point = surface.points[key]
        assert point.median_ms == pytest.approx(base + 4.5 * (key == noisy)) == surface.ms(key)
        assert point.low_ms == pytest.approx(base + 3 * (key == noisy))
        assert point.high_ms == pytest.approx(base + 6 * (key == noisy))
        assert point.repeats == 4


def test_measurement_goes_round_all_pairs_largest_first():
    machine = Machine(lambda key, i: 1.0)
    measure_surface(
        KEYS,
        machine.probe(),
        context_len=0,
        facts={},
        warmup=1,
        repeats=2,
        clock=lambda: machine.seconds,
    )
    turn = ["(2, 4)", "(2, 2)", "(1, 2)", "(1, 1)"]
    want = [f"{what} {key}" for _ in range(3) for key in turn for what in ("prepare", "run")]
    assert machine.log == want


def test_slow_spell_of_a_whole_round_is_divided_out():
    """A machine 50 times slower during one whole round moves neither a median nor a spread."""
    machine = Machine(lambda key, i: key.num_query_tokens * (50.0 if i == 3 else 1.0))
    surface = measure_surface(
        KEYS, machine.probe(), context_len=0, facts={}, clock=lambda: machine.seconds
    )
    for key in KEYS:
        assert surface.ms(key) == pytest.approx(key.num_query_tokens)
        assert surface.points[key].spread == pytest.approx(0.0, abs=1e-9)


def test_load_and_noise_of_one_pair_do_not_add_up():
    """Rounds under load 1, 2, 4, and one pair three times too slow in the second: its plain median
    would be 4, twice what the others' says."""
    load = {2: 1.0, 3: 2.0, 4: 4.0}
    noisy = GraphKey(1, 1)
    machine = Machine(
        lambda key, i: (
            key.num_query_tokens * load.get(i, 1.0) * (3.0 if (key, i) == (noisy, 3) else 1.0)
        )
    )
    surface = measure_surface(
        KEYS, machine.probe(), context_len=0, facts={}, repeats=3, clock=lambda: machine.seconds
    )
    for key in KEYS:
        assert surface.ms(key) == pytest.approx(2.0 * key.num_query_tokens)


def test_two_measurements_in_turns_see_the_same_drift():
    """A machine that slows down steadily: one after the other the second is slower by a third or
    more; in turns the two differ by what one round adds."""
    keys, repeats = KEYS, 9

    def make() -> Machine:
        return Machine(lambda key, i: key.num_query_tokens * (1.0 + 0.05 * i))

    machine = make()
    options = {"context_len": 3, "facts": FACTS, "clock": lambda: machine.seconds}
    later = [measure_surface(keys, machine.probe(), repeats=repeats, **options) for _ in range(2)]
    machine = make()
    turns = measure_twice(keys, machine.probe(), repeats=repeats, now=lambda: 5.0, **options)
    assert [surface.measured_at for surface in turns] == [5.0, 5.0]
    assert all(dict(surface.facts) == FACTS and surface.context_len == 3 for surface in turns)
    for key in keys:
        assert all(surface.points[key].repeats == repeats for surface in turns)
        assert later[1].ms(key) / later[0].ms(key) > 1.33
        # Rounds 1, 3, ... 17 and 2, 4, ... 18 behind a warm-up: medians are rounds 9 and 10.
        assert turns[0].ms(key) == pytest.approx(key.num_query_tokens * (1 + 0.05 * 10))
        assert turns[1].ms(key) == pytest.approx(key.num_query_tokens * (1 + 0.05 * 11))


def test_only_the_run_is_needed():
    surface = measure_surface(KEYS, StepProbe(lambda key: None), context_len=0, facts={}, repeats=1)
    assert set(surface.points) == set(KEYS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": ()}, "at least one point"),
        ({"warmup": -1}, "warmup -1"),
        ({"repeats": 0}, "repeats 0"),
        ({"clock": lambda: 1.0}, r"0\.0 ms for \(2, 4\)"),
        ({"context_len": -1}, "context_len is -1"),
    ],
)
def test_bad_measurements(changes, message):
    keys = changes.pop("keys", KEYS)
    arguments = {"context_len": 0, "facts": {}} | changes
    with pytest.raises(SurfaceError, match=message):
        measure_surface(keys, StepProbe(lambda key: None), **arguments)
    if "warmup" not in changes:
        with pytest.raises(SurfaceError, match=message):
            measure_twice(keys, StepProbe(lambda key: None), **arguments)


def test_table():
    points = {
        GraphKey(1, 1): SurfacePoint(1.0, 0.9, 1.1, 5),
        GraphKey(1, 2): SurfacePoint(1.2345678, 1.2345678, 1.2345678, 5),
        GraphKey(4, 6): SurfacePoint(2.0, 1.0, 4.0, 5),
    }
    lines = Surface(points, 64, 86400.0, {}).format().splitlines()
    assert lines[0].endswith("context 64, measured 1970-01-02T00:00:00+00:00")
    assert lines[1].split() == ["B", "Q/B=", "1", "1.5", "2"]
    assert lines[2].split() == ["1", "1", "+-10%", "-", "1.235", "+-0%"]
    assert lines[3].split() == ["4", "-", "2", "+-75%", "-"]
    assert len({len(line) for line in lines[1:]}) == 1


def test_unmeasured_pair_and_age():
    surface = make_surface(measured_at=1000.0)
    assert surface.age(1300.0) == 300.0
    with pytest.raises(SurfaceError, match=r"no step time for \(9, 9\)"):
        surface.ms(GraphKey(9, 9))


def test_surface_is_a_cost_for_a_grid():
    grid = build_grid(2, 1)
    times = {GraphKey(1, 1): 5.0, GraphKey(1, 2): 6.0, GraphKey(2, 2): 1.0, GraphKey(2, 4): 9.0}
    points = {key: SurfacePoint(ms, ms, ms, 1) for key, ms in times.items()}
    surface = Surface(points, 0, 1.0, {})
    assert grid.with_cost(surface.ms).select(1, 1) == GraphKey(2, 2)


def test_later_changes_of_the_given_mappings_are_not_seen():
    points, facts = {GraphKey(1, 1): SurfacePoint(1, 1, 1, 1)}, {"a": "b"}
    surface = Surface(points, 0, 1.0, facts)
    points.clear()
    facts["a"] = "c"
    assert surface.ms(GraphKey(1, 1)) == 1 and surface.facts == {"a": "b"}
    with pytest.raises(TypeError):
        surface.facts["a"] = "c"  # type: ignore[index]


@pytest.mark.parametrize(
    "values",
    [(0, 0, 1, 1), (2, 3, 4, 1), (5, 3, 4, 1), (1, 1, float("inf"), 1), (float("nan"), 1, 2, 1)],
)
def test_bad_points(values):
    with pytest.raises(SurfaceError, match="need 0 < low <= median <= high"):
        SurfacePoint(*values)
    with pytest.raises(SurfaceError, match="repeats >= 1"):
        SurfacePoint(1, 1, 1, 0)


def test_json_round_trip():
    surface = make_surface()
    assert Surface.from_json(json.loads(json.dumps(surface.as_json())), "s.json") == surface


def edited(path: tuple, value: object) -> dict:
    """The JSON form with one place replaced, or removed for `...`."""
    data = json.loads(json.dumps(make_surface().as_json()))
    place = data
    for name in path[:-1]:
        place = place[name]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), 2, "s.json: format: "),
        (("measured_at",), "now", "s.json: measured_at: "),
        (("measured_at",), float("nan"), "s.json: measured_at: "),
        (("measured_at",), 0, "s.json: measured_at: "),
        (("measured_at",), 10**400, "s.json: measured_at: "),
        (("context_len",), 64.0, "s.json: context_len: "),
        (("context_len",), True, "s.json: context_len: "),
        (("context_len",), ..., "s.json: context_len: Field required"),
        (("facts",), ["a"], "s.json: facts: "),
        (("facts", "torch"), 2.13, r"s.json: facts.torch: "),
        (("points",), {}, "s.json: points: "),
        (("points",), [], "s.json: points: "),
        (("points", 1, "median_ms"), None, r"s.json: points.1.median_ms: "),
        (("points", 1, "median_ms"), True, r"s.json: points.1.median_ms: "),
        (("points", 1, "low_ms"), -1, r"s.json: points.1: .*low_ms=-1"),
        (("points", 1, "num_reqs"), 0, r"s.json: points.1: graph key \(0, 2\)"),
        (("points", 2, "repeats"), 0, r"s.json: points.2: .*repeats=0"),
        (("points", 2, "num_reqs"), 1, r"s.json: points.2: the pair \(1, 2\) is there twice"),
        (("points", 0, "colour"), 1, r"s.json: points.0.colour: "),
        (("colour",), 1, "s.json: colour: "),
    ],
)
def test_bad_json_is_named(path, value, message):
    with pytest.raises(SurfaceError, match=message):
        Surface.from_json(edited(path, value), "s.json")


@pytest.mark.parametrize("data", [None, 3, "x", [1]])
def test_json_that_is_no_object(data):
    with pytest.raises(SurfaceError, match=r"s.json: the file: "):
        Surface.from_json(data, "s.json")


def test_store_gives_back_what_was_saved(tmp_path):
    store = SurfaceStore(tmp_path / "a" / "b")
    assert load(store) == (None, f"no surface has been saved in {tmp_path / 'a' / 'b'}")
    surface = make_surface()
    path = store.save(surface)
    assert path.parent == tmp_path / "a" / "b"
    assert load(store) == (surface, "")
    assert load(store, keys=reversed(KEYS), facts=dict(reversed(FACTS.items()))) == (surface, "")
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_store_replaces_equals_and_keeps_others(tmp_path):
    store = SurfaceStore(tmp_path)
    first = store.save(make_surface(1000.0))
    newer = make_surface(1200.0, scale=2.0)
    assert store.save(newer) == first
    others = [
        make_surface(1300.0, context_len=512),
        make_surface(1300.0, facts=FACTS | {"torch": "2.14"}),
        make_surface(1300.0, keys=KEYS[:3]),
    ]
    assert len({first, *map(store.save, others)}) == 4
    assert load(store) == (newer, "")
    assert load(store, context_len=512) == (others[0], "")
    assert load(store, keys=KEYS[:3]) == (others[2], "")


def test_store_takes_the_newest_of_copies(tmp_path):
    """A file that came from elsewhere counts by what it says, not by its name."""
    store = SurfaceStore(tmp_path)
    store.save(make_surface(1000.0))
    newer = make_surface(1400.0, scale=3.0)
    (tmp_path / "surface-copied.json").write_text(json.dumps(newer.as_json()))
    assert load(store) == (newer, "")
    assert load(store, now=1300.0)[0] == make_surface(1000.0)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"facts": FACTS | {"torch": "2.14"}}, "torch was 2.13, now 2.14"),
        ({"facts": FACTS | {"threads": "2"}}, "threads was (absent), now 2"),
        ({"facts": {"model": "abc", "torch": "2.13"}}, "device was cpu, now (absent)"),
        ({"context_len": 65}, "context_len was 64, now 65"),
        ({"keys": KEYS[1:]}, "0 pairs more and 1 fewer are captured, (1, 1) is no longer captured"),
        (
            {"keys": [*KEYS, GraphKey(3, 3)]},
            "1 pairs more and 0 fewer are captured, (3, 3) is not measured",
        ),
        ({"max_age_s": 499}, "its age is 500 s, allowed are 0..499 s"),
        ({"now": 990}, "its age is -10 s"),
    ],
)
def test_store_says_why_there_is_none(tmp_path, wanted, reason):
    store = SurfaceStore(tmp_path)
    path = store.save(make_surface(1000.0))
    assert load(store, **{"max_age_s": 500} | wanted)[0] is None
    why = load(store, **wanted)[1]
    assert reason in why and str(path) in why


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        (
            "Capacity(num_slots=9, num_blocks=513, verify='coupled', rich=True)",
            "Capacity(num_slots=9, num_blocks=257, verify='rejection', rich=True, slack=0)",
            "capacity.num_blocks was 513, now 257, capacity.verify was 'coupled', "
            "now 'rejection', capacity.slack was (absent), now 0",
        ),
        (
            "Capacity(sizes=(1, 2))",
            "Capacity(sizes=(1, 3))",
            "capacity.sizes was (1, 2), now (1, 3)",
        ),
        ("Old(a=1)", "New(a=1)", "capacity was Old(a=1), now New(a=1)"),
        ("x" * 200, "Capacity(a=1)", f"capacity was {'x' * 57}..., now Capacity(a=1)"),
        ("f(1)", "f(2)", "capacity was f(1), now f(2)"),
        ("f(", "\0", "capacity was f(, now \0"),
    ],
)
def test_of_a_long_fact_the_reason_names_what_differs(tmp_path, theirs, ours, reason):
    store = SurfaceStore(tmp_path)
    path = store.save(make_surface(facts=FACTS | {"capacity": theirs}))
    surface, why = load(store, facts=FACTS | {"capacity": ours})
    assert surface is None and why.startswith(f"{path}: capacity") and why.endswith(reason)


def test_reason_is_of_the_closest(tmp_path):
    store = SurfaceStore(tmp_path)
    store.save(make_surface(1400.0, facts={"model": "x", "torch": "1", "device": "gpu"}))
    store.save(make_surface(1100.0, facts=FACTS | {"device": "gpu"}))
    (tmp_path / "surface-bad.json").write_text("{")
    assert load(store)[1].endswith("device was gpu, now cpu")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b'{"format": 1}', b"NaN"]
)
def test_damage_is_a_reason(tmp_path, content):
    store = SurfaceStore(tmp_path)
    path = store.save(make_surface())
    path.write_bytes(content)
    surface, reason = load(store)
    assert surface is None and reason.startswith(f"cannot use {path}: ")
    assert path.read_bytes() == content
    store.save(make_surface())
    assert load(store) == (make_surface(), "")


def test_every_truncation_is_a_reason(tmp_path):
    store = SurfaceStore(tmp_path)
    path = store.save(make_surface())
    whole = path.read_bytes()
    for length in range(0, len(whole.rstrip()), 37):
        path.write_bytes(whole[:length])
        surface, reason = load(store)
        assert surface is None and str(path) in reason


def test_foreign_files_stay(tmp_path):
    store = SurfaceStore(tmp_path)
    foreign = {"notes.txt": "mine", "other.json": "{", ".surface-x.123.tmp": "part"}
    for name, text in foreign.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "surface-dir.json").mkdir()
    store.save(make_surface())
    assert load(store) == (make_surface(), "")
    assert {name: (tmp_path / name).read_text() for name in foreign} == foreign
    assert len(list(tmp_path.iterdir())) == len(foreign) + 2


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failed_save_keeps_the_old_surface(tmp_path, monkeypatch, call):
    store = SurfaceStore(tmp_path)
    path = store.save(make_surface(1000.0))

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(SurfaceError, match="No space left on device") as caught:
        store.save(make_surface(1200.0))
    assert str(path) in str(caught.value)
    monkeypatch.undo()
    assert load(store) == (make_surface(1000.0), "")
    assert list(tmp_path.iterdir()) == [path]


def test_directory_that_cannot_be_used(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    store = SurfaceStore(file / "below")
    with pytest.raises(SurfaceError, match=str(file / "below")):
        store.save(make_surface())
    assert load(store)[1].startswith(f"cannot read {file / 'below'}: ")


def test_read_only_directory(tmp_path, monkeypatch):
    """Permission is refused by a stand-in, because root may write anywhere."""

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(SurfaceError, match=r"cannot write .*surface-.*Permission denied"):
        SurfaceStore(tmp_path).save(make_surface())
    assert not list(tmp_path.iterdir())


def test_selection_ignores_noise_between_a_pair_and_one_that_covers_it():
    times = {(1, 1): 10.0, (1, 6): 20.0, (2, 2): 9.5, (2, 12): 19.0, (4, 4): 5.0, (4, 24): 30.0}
    points = {GraphKey(*key): SurfacePoint(ms, ms, ms, 1) for key, ms in times.items()}
    surface = Surface(points, 64, 1.0, {})
    grid = Grid(surface.points, 4, 5, surface.selection_cost)
    # (2, 12) seems 5 % faster than (1, 6): noise. (4, 4) takes half of (1, 1): believed.
    assert grid.select(1, 6) == GraphKey(1, 6)
    assert grid.select(1, 1) == GraphKey(4, 4)
    assert Grid(surface.points, 4, 5, surface.ms).select(1, 6) == GraphKey(2, 12)
