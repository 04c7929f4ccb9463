"""Read a memory snapshot of torch, without running anything that it contains.

`torch.cuda.memory._dump_snapshot` writes a pickle, and a pickle can name any function to be called. A snapshot needs
none: it is made of lists, dicts, numbers and text, so every name is refused.
"""

import io
import lzma
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

from actmem.allocator.alloc_conf import MIB, AllocatorSettings
from actmem.allocator.attachment import KEY, Attachment, attachment_from
from actmem.allocator.opcode_scan import has_small_table
from actmem.errors import ModeError, SnapshotError

__all__ = ["Frame", "Snapshot", "SnapshotBlock", "SnapshotSegment", "TraceEvent", "read_snapshot"]

_XZ = b"\xfd7zXZ\x00"
_MOST_BYTES = 8 * 2**30
"""More than any snapshot has: an .xz file that unpacks to more is refused before it fills the memory."""
_BROKEN = (
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RecursionError,
    TypeError,
    UnicodeDecodeError,
    ValueError,
    pickle.UnpicklingError,
)
"""What an unpickler raises for bytes that are not a pickle, or not all of one."""
_MOMENTS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
)
_ACTIONS = (*_MOMENTS, "oom", "snapshot", "user_defined")
_HOW = (
    "A snapshot is what torch.cuda.memory._dump_snapshot('snapshot.pickle') writes, after "
    "torch.cuda.memory._record_memory_history(); .pickle and .pickle.xz are read."
)


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str


class TraceEvent(NamedTuple):
    """One entry of a device's trace."""

    action: str
    address: int
    num_bytes: int
    stream: int
    frames: list[Any]


@dataclass(frozen=True)
class SnapshotBlock:
    """A block at the end of the recording."""

    address: int
    size: int
    requested: int
    is_used: bool
    frames: list[Any]


@dataclass(frozen=True)
class SnapshotSegment:
    """A segment at the end of the recording, or a mapped part of a range."""

    device: int
    address: int
    size: int
    stream: int
    is_small: bool
    is_range: bool
    pool: tuple[int, int]
    """(0, 0), or the pool of a CUDA graph or of `torch.cuda.MemPool`."""
    blocks: tuple[SnapshotBlock, ...]


@dataclass(frozen=True)
class Snapshot:
    """A memory snapshot: the state at its end, and for each device what happened before."""

    segments: tuple[SnapshotSegment, ...]
    traces: tuple[tuple[TraceEvent, ...], ...]
    settings: AllocatorSettings
    has_settings: bool
    """Whether the file says which settings were in force. Versions of torch before 2.2 do not."""
    attachment: Attachment
    """What `actmem record` added to the snapshot; empty if torch alone wrote the file."""

    @property
    def devices(self) -> list[int]:
        """Return the devices that have memory or events."""
        traced = {device for device, trace in enumerate(self.traces) if trace}
        return sorted(traced | {segment.device for segment in self.segments})


def frames_of(raw: list[Any]) -> Iterator[Frame]:
    """Yield the stack of an allocation, innermost line first, as far as the file has it."""
    for frame in raw:
        if isinstance(frame, dict):
            known = cast("dict[str, Any]", frame)
            line = known.get("line")
            yield Frame(
                str(known.get("filename", "")), line if isinstance(line, int) else 0, str(known.get("name", ""))
            )


# ---------------------------------------------------------------- the file


class _Inert(pickle.Unpickler):
    """An unpickler that makes lists, dicts, numbers and text, and refuses everything with a name."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise _NamedError(f"{module_name}.{global_name}")


class _NamedError(Exception):
    """The pickle names something to be imported."""


def read_snapshot(path: str | Path) -> Snapshot:
    """Read a memory snapshot that torch wrote, as .pickle or .pickle.xz.

    Nothing in the file is run or imported: a pickle that names anything is refused.

    >>> read_snapshot("nowhere.pickle")
    Traceback (most recent call last):
    actmem.errors.SnapshotError: cannot read 'nowhere.pickle': No such file or directory. A snapshot is ...

    Args:
        path: The file.

    Raises:
        SnapshotError: if it cannot be read, is cut off, is not a snapshot, comes from a version of torch whose format is
            not known, or names anything to be imported.
    """
    return snapshot_from(_unpickled(path), str(path))


def _unpickled(path: str | Path) -> object:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise SnapshotError(f"cannot read {str(path)!r}: {error.strerror}. {_HOW}") from None
    if data.startswith(_XZ):
        data = _unpacked(data, path)
    if not has_small_table(data):
        raise SnapshotError(
            f"{str(path)!r} is a pickle that asks for a table larger than itself, which would fill the memory. No "
            f"program writes such a pickle, so it was not read. {_HOW}"
        )
    try:
        return _Inert(io.BytesIO(data)).load()
    except _NamedError as error:
        raise SnapshotError(
            f"{str(path)!r} is a pickle that names {error}, which reading it would import or call. A memory snapshot "
            "names nothing, so this file is not one, and nothing of it was run. Do not open it with pickle.load."
        ) from None
    except _BROKEN as error:
        raise SnapshotError(
            f"{str(path)!r} ends too early or is not a pickle ({_first_line(error)}). {_HOW} Copy the file "
            "again if it was transferred; compare its size with the original's."
        ) from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(",: ")


def _unpacked(data: bytes, path: str | Path) -> bytes:
    unpacker = lzma.LZMADecompressor()
    try:
        unpacked = unpacker.decompress(data, max_length=_MOST_BYTES)
    except (lzma.LZMAError, MemoryError) as error:
        raise SnapshotError(f"{str(path)!r} is a damaged .xz file ({error}). Copy it again.") from None
    if unpacker.eof:
        return unpacked
    if len(unpacked) >= _MOST_BYTES:
        raise SnapshotError(
            f"{str(path)!r} unpacks to more than {_MOST_BYTES // 2**30} GiB, more than any memory snapshot. {_HOW}"
        )
    raise SnapshotError(f"{str(path)!r} is an .xz file that is cut off. Copy it again; compare its size.")


# ---------------------------------------------------------------- what is in it


def snapshot_from(content: object, name: str) -> Snapshot:
    """Return the snapshot that unpickled content holds, if it holds one.

    >>> snapshot_from({"segments": [], "device_traces": [[]]}, "example").devices
    []

    Args:
        content: What torch.cuda.memory._snapshot() returns.
        name: How an error calls it.

    Raises:
        SnapshotError: if it is none, or comes from a version of torch whose format is not known.
    """
    if isinstance(content, list):  # torch.cuda.memory_snapshot(): segments only
        content = {"segments": cast("list[Any]", content)}
    known = _dict(content)
    if "segments" not in known:
        keys = f" with the keys {', '.join(sorted(map(repr, known))[:8])}" if known else ""
        kind = type(cast(object, content)).__name__
        raise SnapshotError(
            f"{name!r} holds an object of type {kind}{keys}, and no memory snapshot, which has the key 'segments'. "
            f"{_HOW}"
        )
    reader = _Reader(name)
    segments = tuple(reader.segment(each, i) for i, each in enumerate(reader.items(known["segments"], "segments")))
    traces = tuple(
        reader.trace(each, f"device_traces[{device}]")
        for device, each in enumerate(reader.items(known.get("device_traces", []), "device_traces"))
    )
    raw = _dict(known.get("allocator_settings"))
    try:
        settings = _settings(raw, segments)
    except ModeError as error:
        raise SnapshotError(f"the settings that {name!r} was recorded under are not simulated: {error}") from None
    return Snapshot(segments, traces, settings, bool(raw), attachment_from(known.get(KEY), name))


def _dict(value: object) -> dict[str, Any]:
    """Return a value if it is a dict, and otherwise an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


class _Reader:
    """Read the parts of a snapshot, and say which part is not as expected."""

    def __init__(self, name: str) -> None:
        self._name = name

    def items(self, value: object, where: str) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise self._unknown(f"{where} is of type {type(value).__name__}, not a list")
        return list(cast("list[Any]", value))

    def segment(self, value: object, index: int) -> SnapshotSegment:
        where = f"segments[{index}]"
        address, size = self.number(value, "address", where), self.number(value, "total_size", where)
        kind = self.get(value, "segment_type", where)
        if kind not in {"small", "large"}:
            raise self._unknown(f"{where}['segment_type'] is {kind!r}, not 'small' or 'large'")
        blocks: list[SnapshotBlock] = []
        end = address
        for place, raw in enumerate(self.items(self.get(value, "blocks", where), f"{where}['blocks']")):
            blocks.append(self.block(raw, end, f"{where}['blocks'][{place}]"))
            end += blocks[-1].size
        if end != address + size:
            raise self._unknown(f"the blocks of {where} take {end - address} bytes, and the segment has {size}")
        known = _dict(value)
        pool = self.items(known.get("segment_pool_id", (0, 0)), f"{where}['segment_pool_id']")
        if len(pool) != 2:
            raise self._unknown(f"{where}['segment_pool_id'] is {pool!r}, not two numbers")
        return SnapshotSegment(
            device=self.number(value, "device", where),
            address=address,
            size=size,
            stream=self.number(value, "stream", where),
            is_small=kind == "small",
            is_range=bool(known.get("is_expandable", False)),
            pool=(pool[0], pool[1]),
            blocks=tuple(blocks),
        )

    def block(self, value: object, address: int, where: str) -> SnapshotBlock:
        size, state = self.number(value, "size", where), self.get(value, "state", where)
        if not isinstance(state, str) or not (state == "inactive" or state.startswith("active_")):
            raise self._unknown(f"{where}['state'] is {state!r}, not 'inactive' or 'active_...'")
        known = _dict(value)
        if known.get("address", address) != address or size <= 0:
            raise self._unknown(f"{where} does not begin where the block before it ends")
        requested = known.get("requested_size", size)
        if "frames" not in known and _list(known.get("history")):  # before torch 2.1
            known = _dict(known["history"][0])
        return SnapshotBlock(
            address,
            size,
            requested if isinstance(requested, int) and 0 < requested <= size else size,
            state != "inactive",
            _list(known.get("frames")),
        )

    def trace(self, value: object, where: str) -> tuple[TraceEvent, ...]:
        return tuple(self.event(each, f"{where}[{index}]") for index, each in enumerate(self.items(value, where)))

    def event(self, value: object, where: str) -> TraceEvent:
        action = self.get(value, "action", where)
        if action not in _ACTIONS:
            raise self._unknown(f"{where}['action'] is {action!r}, and known are {', '.join(_ACTIONS)}")
        known = _dict(value)
        is_moment = action in _MOMENTS
        return TraceEvent(
            cast(str, action),
            self.number(value, "addr", where) if is_moment else 0,
            self.number(value, "size", where) if is_moment or action == "oom" else 0,
            self.number(value, "stream", where) if is_moment or "stream" in known else 0,
            _list(known.get("frames")),
        )

    def number(self, value: object, key: str, where: str) -> int:
        found = self.get(value, key, where)
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < 2**64:
            raise self._unknown(f"{where}[{key!r}] is {found!r}, not a number of bytes, an address or a stream")
        return found

    def get(self, value: object, key: str, where: str) -> object:
        if not isinstance(value, dict):
            raise self._unknown(f"{where} is of type {type(value).__name__}, not a dict")
        if key not in value:
            raise self._unknown(f"{where} has no {key!r}")
        return cast("dict[str, Any]", value)[key]

    def _unknown(self, what: str) -> SnapshotError:
        return SnapshotError(
            f"{self._name!r} is not a memory snapshot of a known form: {what}. Snapshots of torch 2.0 to 2.13 are "
            "read; another version may write them otherwise."
        )


def _settings(raw: dict[str, Any], segments: tuple[SnapshotSegment, ...]) -> AllocatorSettings:
    if not raw:
        return AllocatorSettings(expandable_segments=any(segment.is_range for segment in segments))
    # The fields of the file are what was in force; only two settings are in the text alone. What else it names, such as
    # a limit, or a setting of a newer torch, is not needed here: if it matters, decisions come out otherwise.
    text = str(raw.get("PYTORCH_CUDA_ALLOC_CONF") or raw.get("PYTORCH_ALLOC_CONF") or "")
    only = ("max_non_split_rounding_mb:", "backend:")
    named = AllocatorSettings.parse(
        ",".join(item for item in text.replace(" ", "").split(",") if item.startswith(only))
    )
    most = raw.get("max_split_size", -1)
    threshold = raw.get("garbage_collection_threshold", 0.0)
    numbers = list(_dict(raw.get("roundup_power2_divisions")).values())
    return AllocatorSettings(
        expandable_segments=bool(raw.get("expandable_segments", False)),
        max_split_bytes=most if isinstance(most, int) and 20 * MIB <= most < 2**62 else None,
        max_non_split_rounding_bytes=named.max_non_split_rounding_bytes,
        roundup_power2_divisions=tuple(numbers) if len(numbers) == 16 else named.roundup_power2_divisions,
        garbage_collection_threshold=threshold if isinstance(threshold, float) else 0.0,
    )
