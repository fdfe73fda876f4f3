"""Regions kept on disk: a second start compiles nothing and computes the same bits."""

import hashlib
import json
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from decodegrid.capture.binding import Binding, BindingError, InnerSource, TensorFacts, make_binding
from decodegrid.capture.compile import RegionCompiler
from decodegrid.capture.counters import CaptureCounters
from decodegrid.capture.lowering import CompileOptions
from decodegrid.capture.region_store import RegionStore, facts_key, region_file

FACTS = {"torch": "1", "code": "abc"}


def scale_rows(x: torch.Tensor, parts: list[torch.Tensor], count: torch.Tensor, out: torch.Tensor):
    """Two symbolic sizes, a list, a size that is only read, and a static width."""
    total = x * x.shape[1] + count.shape[0]
    for part in parts:
        total = total + part.sum(0)
    out.copy_(total)


DYNAMIC = {"x": (0,), "out": (0,), "parts": (0,)}


def make_compiler(directory: Path, facts: dict[str, str] = FACTS) -> RegionCompiler:
    options = CompileOptions("inductor", num_threads=1)
    return RegionCompiler(options, CaptureCounters(), store=RegionStore(directory, facts))


def arguments(rows: int, others: int = 3, width: int = 8) -> tuple:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator)
    parts = [torch.randn(others, width, generator=generator) for _ in range(2)]
    return x, parts, torch.zeros(4), torch.zeros(rows, width)


def expected(args: tuple) -> torch.Tensor:
    x, parts, _, _ = args
    return x * 8 + 4 + sum(part.sum(0) for part in parts)


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """A directory that one compilation was saved into."""
    directory = tmp_path_factory.mktemp("store")
    compiler = make_compiler(directory)
    region = compiler.region(scale_rows, DYNAMIC)
    region(*arguments(6, 5))
    assert compiler.num_compilations == 1 and compiler.store.notes == []
    return directory


def test_second_start_loads_and_fits_all_sizes(stored):
    compiler = make_compiler(stored)
    region = compiler.region(scale_rows, DYNAMIC)
    for rows, others in [(2, 2), (6, 6), (9, 4), (33, 2)]:
        args = arguments(rows, others)
        region(*args)
        torch.testing.assert_close(args[3], expected(args))
    assert compiler.num_compilations == 0
    assert compiler.counters.num_loaded == 1
    compiler.counters.declare_ready()


@pytest.mark.parametrize(
    "args",
    [
        arguments(6, 5, width=9),
        (*arguments(6)[:2], torch.zeros(5), torch.zeros(6, 8)),
        (arguments(6)[0].double(), *arguments(6)[1:]),
        (arguments(6)[0], arguments(6)[1][:1], *arguments(6)[2:]),
        (torch.zeros(8, 6).t(), *arguments(6)[1:]),
        (*arguments(6)[:3], torch.zeros(7, 8)),
    ],
    ids=["width", "read size", "dtype", "list length", "strides", "unequal symbols"],
)
def test_what_a_compilation_assumed_is_checked(stored, args):
    (stored_region,) = RegionStore(stored, FACTS).load("scale_rows", 1)
    assert stored_region.binding.bind(arguments(6)) is not None
    assert stored_region.binding.bind(args) is None


def test_a_call_that_does_not_fit_is_compiled(stored, tmp_path):
    compiler = make_compiler(shutil.copytree(stored, tmp_path / "copy"))
    region = compiler.region(scale_rows, DYNAMIC, variants=2)
    wide = arguments(6, 5, width=9)
    region(*wide)
    region(*arguments(6, 5))
    assert compiler.num_compilations == 1 and compiler.counters.num_loaded == 1


def test_other_facts_are_another_place(stored):
    assert RegionStore(stored, {**FACTS, "torch": "2"}).load("scale_rows", 1) == []
    assert facts_key(FACTS) == facts_key(dict(reversed(FACTS.items())))


def place(store: RegionStore, index: int = 0) -> Path:
    """The file of a stored variant."""
    return region_file(store.path, "scale_rows", index)


def seal(body: dict) -> str:
    """A file with the right checksum."""
    text = json.dumps(body)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"format": 3, "sha256": digest, "body": text})


@pytest.mark.parametrize(
    "change",
    [
        {"owner": ["other facts", "scale_rows"]},
        {"owner": [facts_key(FACTS), "other_region"]},
        {"written": [99]},
        {"written": "ab"},
        {"module": 7},
        {"module": "def call(:"},
        {"kernels": {"a kernel": "0" * 64}},
        {"kernels": {"kernel": "0" * 64}},
        {"kernels": {"kernel": "../regions/x"}},
        {"kernels": ["0" * 64]},
        {"binding": {"inputs": [[7, "tensor", 0]]}},
        {"binding": {"inputs": [[0, "size", 9]]}},
        {"binding": {"inputs": [["a", "tensor", 0]]}},
        {"binding": {"inputs": [[0, "foo", 0]]}},
        {"binding": {"guards": ["s0 >"]}},
        {"binding": {"guards": ["unknown > 1"]}},
        {"binding": {"guards": [3]}},
        {"binding": {"leaves": []}},
        {"binding": {"structure": [-1, [2]]}},
    ],
    ids=str,
)
def test_well_sealed_files_of_the_wrong_shape_are_noted(stored, tmp_path, change):
    source = RegionStore(stored, FACTS)
    body = json.loads(json.loads(place(source).read_text())["body"])
    changed = {**body, **change}
    if "binding" in change:
        changed["binding"] = {**body["binding"], **change["binding"]}
    store = RegionStore(tmp_path, FACTS)
    shutil.copytree(source.path, store.path)
    place(store).write_text(seal(body))
    assert len(store.load("scale_rows", 1)) == 1 and store.notes == []
    place(store).write_text(seal(changed))
    assert store.load("scale_rows", 1) == []
    assert len(store.notes) == 1 and "scale_rows-0.json" in store.notes[0]


@pytest.mark.parametrize("text", ["[" * 100000, "3", "[]", '{"format": 3, "sha256": 1, "body": 2}'])
def test_files_that_are_no_objects_are_noted(tmp_path, text):
    store = RegionStore(tmp_path, FACTS)
    place(store).parent.mkdir(parents=True)
    place(store).write_text(text)
    assert store.load("scale_rows", 1) == [] and len(store.notes) == 1


def test_a_gap_between_variants_hides_none_and_is_filled(stored, tmp_path):
    text = place(RegionStore(stored, FACTS)).read_text()
    store = RegionStore(tmp_path, FACTS)
    shutil.copytree(RegionStore(stored, FACTS).path, store.path)
    place(store).rename(place(store, 1))
    (variant,) = store.load("scale_rows", 2)
    store.save("scale_rows", variant)
    assert {path.name for path in place(store).parent.iterdir()} == {
        "scale_rows-0.json",
        "scale_rows-1.json",
    }
    assert place(store, 1).read_text() == text
    assert json.loads(place(store).read_text()) == json.loads(text)


def damage_file(path: Path, how: str) -> None:
    """Make a file of a region or a kernel another than the one that was written."""
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flip":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif how == "format":
        path.write_text(json.dumps({**json.loads(content), "format": 0}))
    else:
        path.write_bytes(b"not what it was")


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("regions/*.json", "truncate"),
        ("regions/*.json", "flip"),
        ("regions/*.json", "format"),
        ("regions/*.json", "text"),
        ("kernels/*.so", "truncate"),
        ("kernels/*.so", "flip"),
        ("kernels/*.so", "missing"),
        ("kernels/*.so", "text"),
    ],
)
def test_damaged_files_are_named_and_compiled_again(stored, tmp_path, what, how):
    store = RegionStore(tmp_path, FACTS)
    shutil.copytree(RegionStore(stored, FACTS).path, store.path)
    (damaged,) = store.path.glob(what)
    damage_file(damaged, how)
    compiler = make_compiler(tmp_path)
    region = compiler.region(scale_rows, DYNAMIC)
    assert len(compiler.store.notes) == 1 and "scale_rows-0.json" in compiler.store.notes[0]
    assert what.startswith("regions") or damaged.name in compiler.store.notes[0]
    args = arguments(6, 5)
    region(*args)
    torch.testing.assert_close(args[3], expected(args))
    assert compiler.num_compilations == 1
    again = RegionStore(tmp_path, FACTS)
    assert len(again.load("scale_rows", 1)) == 1 and again.notes == []


def test_a_library_that_the_system_refuses_is_named_and_compiled_again(stored, tmp_path):
    """It is what its name says, but no library: as on a machine without what it needs."""
    store = RegionStore(tmp_path, FACTS)
    shutil.copytree(RegionStore(stored, FACTS).path, store.path)
    refused = b"no library"
    digest = hashlib.sha256(refused).hexdigest()
    (store.path / "kernels" / f"{digest}.so").write_bytes(refused)
    body = json.loads(json.loads(place(store).read_text())["body"])
    assert len(body["kernels"]) == 1
    body["kernels"] = dict.fromkeys(body["kernels"], digest)
    place(store).write_text(seal(body))
    compiler = make_compiler(tmp_path)
    region = compiler.region(scale_rows, DYNAMIC)
    assert compiler.store.notes == []
    args = arguments(6, 5)
    region(*args)
    torch.testing.assert_close(args[3], expected(args))
    assert compiler.num_compilations == 1 and compiler.counters.num_loaded == 0
    assert len(compiler.store.notes) == 1 and digest in compiler.store.notes[0]
    again = make_compiler(tmp_path)
    again.region(scale_rows, DYNAMIC)(*args)
    assert again.num_compilations == 0 and again.store.notes == []


def test_a_moved_directory_loads_from_its_new_place_alone(stored, tmp_path):
    """What was compiled is called: the kernel's library lies in the copy."""
    moved = shutil.copytree(stored, tmp_path / "moved")
    compiler = make_compiler(moved)
    region = compiler.region(scale_rows, DYNAMIC)
    args = arguments(6, 5)
    region(*args)
    torch.testing.assert_close(args[3], expected(args))
    (variant,) = region.loaded
    space = variant.function().__func__.__globals__
    libraries = {
        Path(value.__self__.__file__)
        for value in space.values()
        if getattr(getattr(value, "__self__", None), "__file__", "").endswith(".so")
    }
    assert libraries and {path.parent for path in libraries} == {compiler.store.path / "kernels"}


def test_nothing_on_disk_names_a_place_of_this_machine(stored):
    files = [path for path in stored.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".so"}
    places = [Path.home(), Path(torch.__file__).parents[1], stored, Path(__file__).parents[2]]
    places += [Path(sys.base_prefix), Path(cache_dir()).resolve()]
    for path in files:
        content = path.read_bytes()
        for name in (*map(str, places), socket.gethostname()):
            pattern = re.compile(rb"(?<![\w.-])" + re.escape(name.encode()) + rb"(?![\w.-])")
            assert not pattern.search(content), (path.name, name)


def test_a_place_that_cannot_be_written_is_noted(tmp_path):
    (tmp_path / "file").write_text("")
    compiler = make_compiler(tmp_path / "file")
    args = arguments(6, 5)
    compiler.region(scale_rows, DYNAMIC)(*args)
    torch.testing.assert_close(args[3], expected(args))
    assert any("not saved" in note for note in compiler.store.notes)


def test_expressions_of_symbols_and_guards_are_evaluated():
    facts = (
        TensorFacts("torch.float32", "cpu", ("s0", 4), (4, 1)),
        TensorFacts("torch.float32", "cpu", ("5*s0", 4), (4, 1)),
    )
    inputs = (InnerSource(0), InnerSource(1), InnerSource(0, "size"))
    binding = Binding((-1, -1), facts, inputs, ("s0 < 8", "Ne(s0, 6)"))
    assert binding == Binding.from_json(json.loads(json.dumps(binding.as_json())))

    def fits(rows: int, more: int) -> bool:
        return binding.bind((torch.zeros(rows, 4), torch.zeros(more, 4))) is not None

    assert fits(3, 15) and fits(7, 35)
    assert not fits(3, 14) and not fits(8, 40) and not fits(6, 30) and not fits(1, 5)
    one, two = torch.zeros(3, 4), torch.zeros(15, 4)
    inner = binding.bind((one, two))
    assert inner[0] is one and inner[1] is two and inner[2] == 3


def read_column(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


def test_strides_that_are_symbols(tmp_path):
    """A column of a buffer: the code takes its stride and its offset."""
    for expected_compilations in (1, 0):
        compiler = make_compiler(tmp_path)
        region = compiler.region(read_column, {"x": (0,), "out": (0,)})
        for rows, width, column in ((4, 5, 2), (6, 9, 1), (3, 4, 3)):
            x = torch.arange(float(rows * width * 8)).view(rows, width, 8)[:, column]
            out = torch.zeros(rows, 8)
            region(x, out)
            assert torch.equal(out, x * 2)
        assert compiler.store.notes == []
        assert compiler.num_compilations == expected_compilations


def test_foreign_tensors_and_plain_numbers_are_refused():
    x = torch.zeros(3)
    with pytest.raises(BindingError, match="not an argument"):
        make_binding((x,), (torch.zeros(3),), (x,), {})
    with pytest.raises(BindingError, match="neither"):
        make_binding((x, 3), (x,), (x,), {})
    with pytest.raises(BindingError, match="which no tensor has"):
        make_binding((x,), (x, 7), (x, 7), {})
