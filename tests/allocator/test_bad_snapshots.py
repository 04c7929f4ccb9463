"""A file that is no snapshot is refused with its reason, and nothing in it runs."""

import datetime
import lzma
import os
import pickle
import pickletools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

import actmem
from actmem.allocator import Attachment, read_snapshot, reenact, snapshot_from, write_recording
from tests.allocator.recorder import MIB, Recorder


def recorded() -> dict[str, Any]:
    return Recorder.example().snapshot()


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    content = recorded()
    change(content)
    return pickle.dumps(content)


class Hostile:
    """Its pickle calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


GLOBALS = {
    "a call": pickle.dumps({"segments": [Hostile()]}),
    "an old call": pickle.dumps(Hostile(), protocol=0),
    "a harmless class": pickle.dumps({"segments": [], "when": datetime.date(2026, 1, 1)}),
    "a persistent name": b"\x80\x04\x8c\x04ran.Q.",
    "an extension": b"\x80\x04\x82\x01.",
    "a nested pickle": pickle.dumps({"segments": pickle.dumps(Hostile())}),
}

BROKEN: dict[str, Callable[[], bytes]] = {
    "cut off": lambda: pickle.dumps(recorded())[:-40],
    "cut off, xz": lambda: lzma.compress(pickle.dumps(recorded()))[:-30],
    "damaged, xz": lambda: b"\xfd7zXZ\x00" + bytes(100),
    "a pickle that fills the memory": lambda: b"\x80\x04Nr\xff\xff\xff\x7f.",
    "an old pickle that fills the memory": lambda: b"(lp0004000000000\n.",
    "empty": lambda: b"",
    "text": lambda: b"peak allocated: 3 GiB\n",
    "an image": lambda: b"\x89PNG\r\n\x1a\n" + bytes(64),
    "a number": lambda: pickle.dumps(3),
    "another dict": lambda: pickle.dumps({"model": {}, "optimizer": {}}),
    "a state dict": lambda: pickle.dumps([1, 2, 3]),
    "segments that are none": lambda: changed(lambda c: c.update(segments=3)),
    "a segment without a size": lambda: changed(lambda c: c["segments"][0].pop("total_size")),
    "a segment of another kind": lambda: changed(lambda c: c["segments"][0].update(segment_type="huge")),
    "blocks that do not add up": lambda: changed(lambda c: c["segments"][0]["blocks"].pop()),
    "a block elsewhere": lambda: changed(lambda c: c["segments"][0]["blocks"][0].update(address=7)),
    "a negative size": lambda: changed(lambda c: c["device_traces"][0][0].update(size=-5)),
    "a size that is text": lambda: changed(lambda c: c["device_traces"][0][0].update(size="5")),
    "another torch's action": lambda: changed(lambda c: c["device_traces"][0][0].update(action="segment_lend")),
    "an event without an address": lambda: changed(lambda c: c["device_traces"][0][0].pop("addr")),
    "another backend": lambda: changed(
        lambda c: c["allocator_settings"].update(PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    ),
    "an attachment of another form": lambda: changed(lambda c: c.update(actmem={"plan": 3})),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_snapshot_is_refused_with_its_reason(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.pickle").write_bytes(BROKEN[case]())
    with pytest.raises(actmem.SnapshotError) as raised:
        read_snapshot("file.pickle")
    assert str(raised.value) == snapshot


@pytest.mark.parametrize("case", GLOBALS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_pickle_that_names_anything_is_refused_and_nothing_runs(
    case: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = GLOBALS[case]
    Path("file.pickle.xz").write_bytes(lzma.compress(data) if packed else data)
    with pytest.raises(actmem.SnapshotError):
        read_snapshot("file.pickle.xz")
    assert not Path("ran").exists()


def test_the_message_names_what_a_hostile_pickle_names(tmp_path: Path) -> None:
    path = tmp_path / "file.pickle"
    path.write_bytes(GLOBALS["a call"])
    with pytest.raises(actmem.SnapshotError, match=r"names posix.mkdir, .* nothing of it was run"):
        read_snapshot(path)


def test_every_cut_of_a_snapshot_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.pickle"
    data = pickle.dumps(recorded())
    for end in [*range(0, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:end])
        with pytest.raises(actmem.SnapshotError):
            read_snapshot(path)


def test_no_opcode_of_a_pickle_runs_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("file.pickle")
    num_refused = 0
    for opcode in pickletools.opcodes:
        for before in (b"", b"N", b"(", b"}", b"\x8c\x02os\x8c\x05mkdir", b"\x8c\x05posix\x8c\x05mkdir(\x8c\x03rant"):
            for behind in (b".", b"posix\nmkdir\n(\x8c\x03rantR.", b"(\x8c\x03rantR.", b"\x01\x00\x00\x00."):
                path.write_bytes(b"\x80\x04" + before + opcode.code.encode("latin-1") + behind)
                with suppress(actmem.SnapshotError):
                    read_snapshot(path)
                    continue
                num_refused += 1
    assert num_refused > 1000
    assert not Path("ran").exists()


def test_an_xz_file_that_unpacks_to_far_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from actmem.allocator import snapshot_file

    monkeypatch.setattr(snapshot_file, "_MOST_BYTES", 2**20)
    path = tmp_path / "file.pickle.xz"
    path.write_bytes(lzma.compress(bytes(2**22)))
    with pytest.raises(actmem.SnapshotError, match="more than any memory snapshot"):
        read_snapshot(path)


def test_plain_and_packed_files_are_read_alike(tmp_path: Path) -> None:
    data = pickle.dumps(recorded())
    for name, written in (("a.pickle", data), ("b.pickle.xz", lzma.compress(data)), ("c.pickle", lzma.compress(data))):
        (tmp_path / name).write_bytes(written)
        assert read_snapshot(tmp_path / name) == snapshot_from(recorded(), "recorded")


def test_a_recording_is_a_snapshot_with_an_attachment_that_comes_back(tmp_path: Path) -> None:
    attachment = Attachment({"torch": "2.13"}, '{"rules": []}', 7 * MIB, (1, 2, 3))
    path = tmp_path / "step.pickle.xz"
    write_recording(path, recorded(), attachment)
    found = read_snapshot(path)
    assert found.attachment == attachment
    assert found.segments == snapshot_from(recorded(), "recorded").segments
    with pytest.raises(actmem.ModeError, match="Name a file in a folder that exists"):
        write_recording(tmp_path / "nowhere" / "step.pickle.xz", recorded(), attachment)


def test_a_list_of_segments_alone_is_a_snapshot_without_a_trace() -> None:
    found = snapshot_from(recorded()["segments"], "segments")
    assert found.devices == [0]
    assert found.traces == ()
    assert not found.has_settings


def test_settings_of_a_recording_that_are_not_simulated_do_not_keep_it_from_being_read() -> None:
    content = recorded()
    content["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "per_process_memory_fraction:0.5,newer:1"
    assert reenact(snapshot_from(content, "recorded"), 0).is_exact
