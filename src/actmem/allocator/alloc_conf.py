"""The caching allocator's settings, as the variable PYTORCH_CUDA_ALLOC_CONF has them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from actmem.errors import ModeError
from actmem.ops import did_you_mean

__all__ = ["MIB", "AllocatorSettings", "Tie"]

MIB = 2**20
_INTERVALS = 16
"""`roundup_power2_divisions` has one number for each power of two from 1 MiB on; the last is for all that follow."""

Tie = Literal["address", "age"]

_IGNORED = (
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom",
)
"""Settings that change pinned memory, locks, graph capture or an error, but no block of device memory."""

_REFUSED = {
    "per_process_memory_fraction": "it is a limit, not a rule of the allocator. Pass limit_bytes= to the simulation",
    "large_segment_size_mb": "no recording shows what it does. Leave it out: the default of 20 is simulated",
}


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """What PYTORCH_CUDA_ALLOC_CONF sets, and the rule that is different in newer versions of torch.

    >>> AllocatorSettings.parse("expandable_segments:True,max_split_size_mb:128")
    AllocatorSettings(expandable_segments:True,max_split_size_mb:128)
    >>> AllocatorSettings().max_split_bytes is None
    True

    Raises:
        ModeError: if a field has a value that torch refuses.
    """

    expandable_segments: bool = False
    """Segments are address ranges that grow, not separate pieces of memory."""
    max_split_bytes: int | None = None
    """Blocks of at least this size are never split. None: every block may be."""
    max_non_split_rounding_bytes: int = 20 * MIB
    """By how much a block that may not be split can be larger than the request that gets it."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS
    """Steps between two powers of two to which sizes are rounded up, from 1 MiB on; 0 and 1 round to 512 bytes only."""
    garbage_collection_threshold: float = 0.0
    """Kept, without effect: torch collects only under `set_per_process_memory_fraction`, which is not simulated."""
    tie: Tie = "address"
    """Which of two free blocks of one size is taken: the one at the lower `address`, as up to torch 2.11, or the one
    in the segment of greater `age`, as in versions with pytorch#183591."""

    def __post_init__(self) -> None:
        least = 20 * MIB
        if self.max_split_bytes is not None and self.max_split_bytes < least:
            raise ModeError(_too_small("max_split_size_mb", self.max_split_bytes // MIB))
        if self.max_non_split_rounding_bytes < least:
            raise ModeError(_too_small("max_non_split_rounding_mb", self.max_non_split_rounding_bytes // MIB))
        if not 0 <= self.garbage_collection_threshold < 1:
            raise ModeError(
                f"garbage_collection_threshold is {self.garbage_collection_threshold!r}; expected a number above 0 and "
                "below 1, such as garbage_collection_threshold:0.8, as torch requires."
            )
        divisions = self.roundup_power2_divisions
        if len(divisions) != _INTERVALS or not all(number == 0 or _is_power_of_two(number) for number in divisions):
            raise ModeError(
                f"roundup_power2_divisions is {divisions!r}; expected {_INTERVALS} numbers that are 0 or powers of "
                "two, one for each power of two from 1 MiB on, as torch requires. "
                "AllocatorSettings.parse('roundup_power2_divisions:4') fills them in."
            )

    @classmethod
    def parse(cls, text: str, *, tie: Tie = "address") -> "AllocatorSettings":
        """Read the value of PYTORCH_CUDA_ALLOC_CONF.

        Settings of pinned memory, locks and graph capture are accepted and have no effect on device memory.

        >>> AllocatorSettings.parse("roundup_power2_divisions:[256:1,512:2,>:4]").roundup_power2_divisions[7:12]
        (1, 1, 2, 4, 4)

        Args:
            text: Pairs `key:value`, separated by commas. An empty text gives the defaults.
            tie: The rule for equal blocks, which no variable sets.

        Raises:
            ModeError: if a key is unknown or not simulated, or a value is not one that torch accepts.
        """
        fields: dict[str, object] = {}
        compact = re.sub(r"\s", "", text).removesuffix(",")
        for item in re.split(r",(?![^\[]*\])", compact) if compact else []:
            key, colon, value = item.partition(":")
            if key in _REFUSED:
                raise ModeError(f"{key} in {text!r} is not simulated: {_REFUSED[key]}.")
            if key not in _READERS and key not in _IGNORED:
                raise ModeError(
                    f"{key!r} in {text!r} is not a known setting of the CUDA allocator."
                    f"{did_you_mean(key, (*_READERS, *_IGNORED))} Simulated: {', '.join(_READERS)}. "
                    f"Without effect on device memory: {', '.join(_IGNORED)}."
                )
            if not colon or not value:
                raise ModeError(f"{key} in {text!r} has no value; expected {key}:VALUE.")
            if key in _READERS:
                name, read = _READERS[key]
                fields |= {name: read(key, value)} if name else read(key, value) or {}  # type: ignore[operator]
        return cls(tie=tie, **fields)  # type: ignore[arg-type]

    @classmethod
    def of(cls, value: "str | AllocatorSettings") -> "AllocatorSettings":
        """Return settings as they are, and read text.

        >>> AllocatorSettings.of("expandable_segments:True") == AllocatorSettings(expandable_segments=True)
        True

        Raises:
            ModeError: if the value is neither, or text that is refused.
        """
        if isinstance(value, AllocatorSettings):
            return value
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
            raise ModeError(
                f"allocator = {value!r} is not permitted. Expected what PYTORCH_CUDA_ALLOC_CONF would be, such as "
                "'expandable_segments:True', or an actmem.allocator.AllocatorSettings."
            )
        return cls.parse(value)

    @property
    def text(self) -> str:
        """Return the settings that are not defaults as PYTORCH_CUDA_ALLOC_CONF would have them.

        >>> AllocatorSettings(max_split_bytes=128 * 2**20).text
        'max_split_size_mb:128'
        """
        divisions = self.roundup_power2_divisions
        parts = {
            "expandable_segments": "True" if self.expandable_segments else "",
            "max_split_size_mb": "" if self.max_split_bytes is None else str(self.max_split_bytes // MIB),
            "max_non_split_rounding_mb": ""
            if self.max_non_split_rounding_bytes == 20 * MIB
            else str(self.max_non_split_rounding_bytes // MIB),
            "roundup_power2_divisions": _divisions_text(divisions) if any(divisions) else "",
            "garbage_collection_threshold": f"{self.garbage_collection_threshold or ''}",
        }
        return ",".join(f"{key}:{value}" for key, value in parts.items() if value)

    def __repr__(self) -> str:
        tie = "" if self.tie == "address" else f"tie={self.tie!r}"
        return f"AllocatorSettings({', '.join(part for part in (self.text, tie) if part)})"

    def rounded(self, request: int) -> int:
        """Return the bytes that a request for memory becomes, before a block is looked for.

        >>> AllocatorSettings().rounded(1), AllocatorSettings().rounded(513)
        (512, 1024)
        >>> AllocatorSettings.parse("roundup_power2_divisions:4").rounded(1200 * 2**10) // 2**10
        1280
        """
        if request < 512:
            return 512
        divisions = self.roundup_power2_divisions[min(max(request.bit_length() - 21, 0), _INTERVALS - 1)]
        if divisions > 1 and request > 512 * divisions:
            step = (1 << request.bit_length() - 1) // divisions
            return -(-request // step) * step
        return (request + 511) & ~511


# ---------------------------------------------------------------- reading values


def _boolean(key: str, value: str) -> bool:
    if value not in {"True", "False"}:
        raise ModeError(f"{key} is {value!r}; expected True or False, written so, as torch requires.")
    return value == "True"


def _mib(key: str, value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise ModeError(f"{key} is {value!r}; expected a whole number of MiB, such as {key}:128.")
    return int(value) * MIB


def _fraction(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ModeError(f"{key} is {value!r}; expected a number above 0 and below 1, such as {key}:0.8.") from None


def _backend(key: str, value: str) -> None:
    if value != "native":
        raise ModeError(
            f"{key} is {value!r}, and only `native` is simulated: cudaMallocAsync leaves all decisions to the driver, "
            "whose rules are not public. Leave the setting out."
        )


def _divisions(key: str, value: str) -> tuple[int, ...]:
    wrong = ModeError(
        f"{key} is {value!r}; expected a power of two, such as {key}:4, or a list of sizes in MiB and divisions, such "
        f"as {key}:[256:1,512:2,>:4]."
    )
    if not value.startswith("["):
        number = _whole(value, wrong)
        if not _is_power_of_two(number):
            raise wrong
        return (number,) * _INTERVALS
    if not value.endswith("]"):
        raise wrong
    numbers, last = [0] * _INTERVALS, None
    for pair in value[1:-1].split(","):
        start, _, text = pair.partition(":")
        number = _whole(text, wrong)
        if number and not _is_power_of_two(number):
            raise wrong
        if start == ">":
            behind = (last or 0) + 1
            numbers[behind:] = [number] * (_INTERVALS - behind)
            continue
        mib = _whole(start, wrong)
        if not _is_power_of_two(mib):
            raise wrong
        index = min(mib.bit_length() - 1, _INTERVALS - 1)
        if last is None:
            numbers[:index] = [number] * index
        numbers[index], last = number, index
    return tuple(numbers)


def _divisions_text(divisions: tuple[int, ...]) -> str:
    if len(set(divisions)) == 1:
        return str(divisions[0])
    return f"[{','.join(f'{1 << index}:{number}' for index, number in enumerate(divisions))}]"


def _whole(text: str, wrong: ModeError) -> int:
    if not text.isascii() or not text.isdigit():
        raise wrong
    return int(text)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _too_small(key: str, mib: int) -> str:
    return f"{key} is {mib}; expected at least 20, as torch requires, such as {key}:128."


_READERS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "expandable_segments": ("expandable_segments", _boolean),
    "max_split_size_mb": ("max_split_bytes", _mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _fraction),
    "backend": ("", _backend),
}
"""For each simulated setting: the field that it becomes, and what reads its value."""
