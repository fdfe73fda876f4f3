"""Dump files: whole or absent, private, bounded, and one clear error for each kind of damage."""

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from decodegrid.engine.replay_dump import Dump, Sizes, Versions, load_dump
from decodegrid.engine.replay_file import FORMAT_VERSION, DumpError, read_dump, write_dump


@pytest.fixture
def content() -> bytes:
    """A dump without steps."""
    made = Dump(
        reason="crash",
        message="planted",
        made_at="2026-01-02T03:04:05+00:00",
        step=None,
        versions=Versions(decodegrid="0", python="3", torch="2", numpy="2"),
        config=None,
        config_hash=None,
        facts={},
        sizes=Sizes(
            num_draft_tokens=2,
            max_num_reqs=2,
            max_model_len=64,
            block_size=8,
            num_blocks=17,
            vocab_size=96,
            prefill_chunk_sizes=(8,),
        ),
        has_token_ids=False,
        requests=(),
        steps=(),
    )
    return made.model_dump_json().encode()


def framed(content: bytes, **changes: object) -> bytes:
    header = {
        "decodegrid_dump": FORMAT_VERSION,
        "num_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        **changes,
    }
    return json.dumps(header).encode() + b"\n" + content


def test_what_is_written_is_read(tmp_path: Path, content: bytes) -> None:
    path = write_dump(tmp_path / "new" / "dumps", content, keep=3)
    assert read_dump(path) == content
    assert load_dump(path).message == "planted"
    assert path.read_bytes() == framed(content), "the frame is as documented"


def test_nobody_else_may_read_it(tmp_path: Path, content: bytes) -> None:
    old = os.umask(0)
    try:
        path = write_dump(tmp_path / "dumps", content, keep=3)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_oldest_give_way_and_foreign_files_stay(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "step-notes.txt").write_text("mine")
    (tmp_path / "step-1.dump").write_text("mine too")
    written = []
    for _ in range(5):
        written.append(write_dump(tmp_path, content, keep=2))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step-notes.txt", "step-1.dump", *(path.name for path in written[3:])}


def test_a_new_dump_stays_though_the_clock_was_set_back(tmp_path: Path, content: bytes) -> None:
    later = tmp_path / "step-20991231T000000.000000Z-00000000.dump"
    later.write_bytes(b"")
    path = write_dump(tmp_path, content, keep=1)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_an_unwritable_directory_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dumps").write_text("a file")
    with pytest.raises(DumpError, match=r"cannot write the dump .*dumps/step-.*exists"):
        write_dump(tmp_path / "dumps", content, keep=1)


@pytest.mark.parametrize("length", [0, 1, 40, -200, -1])
def test_a_cut_file_is_refused(tmp_path: Path, content: bytes, length: int) -> None:
    path = tmp_path / "cut.dump"
    path.write_bytes(framed(content)[:length])
    with pytest.raises(DumpError, match=r"cut\.dump is (cut off|not a dump)"):
        load_dump(path)


def test_every_changed_byte_is_noticed(tmp_path: Path, content: bytes) -> None:
    path, whole = tmp_path / "changed.dump", framed(content)
    for place in range(0, len(whole), 7):
        data = bytearray(whole)
        data[place] ^= 0x11
        path.write_bytes(bytes(data))
        with pytest.raises(DumpError) as caught:
            load_dump(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not a dump at all", "is not a dump of decodegrid"),
        (b'{"a": 1}\n{}', "is not a dump of decodegrid"),
        (b"[" * 100000 + b"\n", "is not a dump of decodegrid"),
        (b"\x00" * 300 + b"\n" + b"\xff" * 20, "is not a dump of decodegrid"),
        (framed(b"{}", decodegrid_dump=2), "format version 2; this decodegrid reads version 1"),
        (framed(b"{}", decodegrid_dump=True), "is not a dump of decodegrid"),
        (framed(b"{}", num_bytes=-1), "is not a dump of decodegrid"),
        (framed(b"{}", num_bytes=1), "has 1 bytes behind its end"),
        (framed(b"{}", num_bytes=10**30), "is cut off"),
        (framed(b"{}", sha256="0"), "is damaged"),
        (framed(b"{}"), "reason: Field required"),
        (framed(b"[1, 2"), "content: Invalid JSON"),
        (framed(b"[" * 100000), "content: Invalid JSON"),
    ],
)
def test_foreign_and_newer_files_get_one_line(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.dump"
    path.write_bytes(data)
    with pytest.raises(DumpError) as caught:
        load_dump(path)
    text = str(caught.value)
    assert message in text and str(path) in text and "\n" not in text


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("none", "there is no dump"),
        ("pipe", "not a file"),
        (".", "not a file"),
    ):
        with pytest.raises(DumpError, match=message):
            load_dump(tmp_path / name)


def test_a_request_that_is_not_there_is_refused(tmp_path: Path, content: bytes) -> None:
    tree = json.loads(content)
    tree["steps"] = [
        {"kind": "prefill", "index": 4, "age_s": 0, "seconds": None, "request": 7, "slot": 1,
         "start": 0, "num_tokens": 3, "num_blocks": 1}
    ]  # fmt: skip
    path = tmp_path / "x.dump"
    path.write_bytes(framed(json.dumps(tree).encode()))
    with pytest.raises(DumpError, match="step 4 names request 7"):
        load_dump(path)


def test_a_killed_process_leaves_no_half_dump(
    tmp_path: Path, content: bytes, wait_for: Callable[[Callable[[], bool]], None]
) -> None:
    """Killed again and again while it writes: every file with a dump's name is whole, and a later
    write removes the parts once they are old."""
    script = (
        "import sys; from pathlib import Path\n"
        "from decodegrid.engine.replay_file import write_dump\n"
        "content = b'x' * (4 << 20)\n"
        "while True: write_dump(Path(sys.argv[1]), content, keep=3)\n"
    )
    for _ in range(4):
        seen = {path.name for path in tmp_path.glob("step-*.dump")}
        child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
        try:
            wait_for(lambda old=seen: bool({p.name for p in tmp_path.glob("step-*.dump")} - old))
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
        for path in tmp_path.glob("step-*.dump"):
            assert read_dump(path) == b"x" * (4 << 20)
    part = tmp_path / ".step-20260101T000000.000000Z-00000000.dump.part"
    part.write_bytes(b"half")
    os.utime(part, (time.time() - 7200,) * 2)
    young = tmp_path / ".step-20260101T000000.000000Z-00000001.dump.part"
    young.write_bytes(b"being written")
    write_dump(tmp_path, content, keep=3)
    assert young.exists() and not part.exists()


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.002)

    return wait
