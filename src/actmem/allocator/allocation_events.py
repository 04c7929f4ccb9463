"""What a program asks of the caching allocator: the events of a simulation."""

from typing import NamedTuple

__all__ = ["Alloc", "EmptyCache", "Event", "Free", "FreeCompleted", "FreeRequested"]


class Alloc(NamedTuple):
    """Memory is requested. The name is free again once the memory is freed.

    >>> Alloc("logits", 4 * 128256 * 8192)
    Alloc(name='logits', num_bytes=4202692608, stream=0)
    """

    name: int | str
    num_bytes: int
    """As requested: the allocator rounds. A request for no bytes never reaches it, and is passed over."""
    stream: int = 0


class Free(NamedTuple):
    """Memory is freed, and may be reused at once."""

    name: int | str


class FreeRequested(NamedTuple):
    """Memory is freed that another stream uses (`record_stream`): it stays taken until `FreeCompleted`."""

    name: int | str


class FreeCompleted(NamedTuple):
    """The other streams have finished with memory that was freed."""

    name: int | str


class EmptyCache(NamedTuple):
    """`torch.cuda.empty_cache()`: unused segments go back to the driver."""


Event = Alloc | Free | FreeRequested | FreeCompleted | EmptyCache
