"""Say how to offload, without torch: where to, what is worth it, and how much may be under way."""

import os
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, cast

from actmem.errors import ModeError
from actmem.ops import did_you_mean

__all__ = ["STRICT", "Offload", "Place"]

Place = Literal["host", "disk"]
_PLACES = ("host", "disk")

STRICT: dict[str, bool | str] = {"extra": "forbid", "strict": True}
"""How pydantic is to read a class from a file. It is imported only then."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Offload:
    """Say where offloaded values go, and how.

    >>> Offload(to="disk", directory="/scratch", min_bytes=2**20)
    Offload(to='disk', min_bytes=1048576, directory='/scratch')

    Raises:
        ModeError: if a field has a value that is not permitted.
    """

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    to: Place
    """`host`: the memory of the machine, for models on an accelerator. `disk`: a private file."""
    min_bytes: int = 64 * 1024
    """Smaller values stay where they are: moving them costs more than they take."""
    in_flight_bytes: int = 512 * 2**20
    """How many bytes may be on their way out at once, and how many may be fetched ahead of their use."""
    max_in_flight: int | None = None
    """How many values may be on their way out at once, besides."""
    pin: bool = True
    """Use page-locked host memory. Without an accelerator there is none, and this says nothing."""
    use_streams: bool = True
    """Copy beside the computation. False copies in its line, which is slower and easier to reason about."""
    limit_bytes: int | None = None
    """The most that may be away at once. None: what the machine has to spare."""
    directory: str | None = None
    """Where the file of `disk` goes: a folder on a fast local disk. None: the folder for temporary files."""
    copy_cpu: bool = False
    """Copy values of a model on the CPU to other host memory too. That saves nothing; tests and benchmarks want it."""

    def __post_init__(self) -> None:
        if self.to not in _PLACES:
            hint = did_you_mean(self.to, _PLACES) if isinstance(cast(object, self.to), str) else ""
            raise ModeError(f"to = {self.to!r} is not known. Permitted: host, disk.{hint} Write Offload(to='host').")
        for name, least in (("min_bytes", 0), ("in_flight_bytes", 1), ("max_in_flight", 1), ("limit_bytes", 1)):
            value = cast(object, getattr(self, name))
            if value is None and name in ("max_in_flight", "limit_bytes"):
                continue
            if type(value) is not int or value < least:
                raise ModeError(f"{name} = {value!r} is not permitted. Expected an int of {least} or more.")
        for name in ("pin", "use_streams", "copy_cpu"):
            if type(getattr(self, name)) is not bool:
                raise ModeError(f"{name} = {getattr(self, name)!r} is not permitted. Write True or False.")
        directory = cast(object, self.directory)
        if directory is not None:
            if not isinstance(directory, (str, os.PathLike)) or not os.fspath(cast(str, directory)):
                raise ModeError(f"directory = {directory!r} is no path. Expected a folder, such as '/scratch'.")
            object.__setattr__(self, "directory", os.fspath(cast(str, directory)))
            if self.to == "host":
                raise ModeError(
                    f"directory = {self.directory!r} stands beside to = 'host', which uses no file. "
                    "Leave it out, or write to='disk'."
                )

    def __repr__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Offload({', '.join(f'{name}={value!r}' for name, value in given)})"
