"""Settings of offloading and of compilation, without torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, cast

from actmem.errors import ModeError
from actmem.ops import did_you_mean

__all__ = ["STORES", "STRICT", "Compiled", "Offload", "Place", "Split", "StoreKind", "check_split"]

Place = Literal["host", "disk"]


@dataclass(frozen=True)
class StoreKind:
    """What must be known about a store before it is created."""

    frees_host_memory: bool
    """Whether values stored there leave host memory, so that a model on the CPU benefits."""
    has_files: bool
    """Whether it takes a `directory`."""


STORES: dict[Place, StoreKind] = {
    "host": StoreKind(frees_host_memory=False, has_files=False),
    "disk": StoreKind(frees_host_memory=True, has_files=True),
}
"""The table of stores. A new one has a line here, one in `offloading/factory.py`, and a file of its own."""

STRICT: dict[str, bool | str] = {"extra": "forbid", "strict": True}
"""How pydantic reads a class from a file. It is imported only then."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Offload:
    """Where offloaded values go, and how.

    >>> Offload(to="disk", directory="/scratch", min_bytes=2**20)
    Offload(to='disk', min_bytes=1048576, directory='/scratch')

    Raises:
        ModeError: if a field has a value that is not permitted.
    """

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    to: Place
    """`host`: the memory of the machine, for models on an accelerator. `disk`: a private file."""
    min_bytes: int = 64 * 1024
    """Smaller values stay where they are: moving them costs more than it saves."""
    in_flight_bytes: int | None = None
    """How many bytes may be in flight: sent and still in memory, or prefetched. None: what two blocks send."""
    max_in_flight: int | None = None
    """How many values may be in flight, in addition."""
    pin: bool = True
    """Use page-locked host memory. Has no effect without an accelerator."""
    use_streams: bool = True
    """Overlap copies with the computation. False copies synchronously, which is slower and easier to reason about."""
    limit_bytes: int | None = None
    """The most bytes that may be offloaded at once. None: what the machine has to spare."""
    directory: str | None = None
    """Where the file of `disk` goes: a folder on a fast local disk. None: the folder for temporary files."""
    copy_cpu: bool = False
    """Copy values of a model on the CPU to other host memory too. That saves nothing; for tests and benchmarks."""

    def __post_init__(self) -> None:
        if self.to not in STORES:
            hint = did_you_mean(self.to, tuple(STORES)) if isinstance(cast(object, self.to), str) else ""
            permitted = ", ".join(STORES)
            raise ModeError(f"to = {self.to!r} is not known. Permitted: {permitted}.{hint} Write Offload(to='host').")
        for name, least in (("min_bytes", 0), ("in_flight_bytes", 1), ("max_in_flight", 1), ("limit_bytes", 1)):
            value = cast(object, getattr(self, name))
            if value is None and name != "min_bytes":
                continue
            if type(value) is not int or value < least:
                raise ModeError(f"{name} = {value!r} is not permitted. Expected an int of {least} or more.")
        for name in ("pin", "use_streams", "copy_cpu"):
            if type(getattr(self, name)) is not bool:
                raise ModeError(f"{name} = {getattr(self, name)!r} is not permitted. Write True or False.")
        directory = cast(object, self.directory)
        if directory is not None:
            if not isinstance(directory, (str, os.PathLike)) or not os.fspath(cast(str, directory)):
                raise ModeError(f"directory = {directory!r} is not a path. Expected a folder, such as '/scratch'.")
            object.__setattr__(self, "directory", os.fspath(cast(str, directory)))
            if not STORES[self.to].has_files:
                raise ModeError(
                    f"directory = {self.directory!r} cannot be combined with to = {self.to!r}, which uses no file. "
                    "Omit it, or write to='disk'."
                )

    def takes_from(self, device_type: str) -> bool:
        """Return whether values on such a device can be offloaded.

        >>> Offload(to="host").takes_from("cuda"), Offload(to="host").takes_from("cpu")
        (True, False)
        >>> Offload(to="disk").takes_from("cpu")
        True
        """
        if device_type == "cpu":
            return STORES[self.to].frees_host_memory or self.copy_cpu
        return device_type != "meta"

    def __repr__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Offload({', '.join(f'{name}={value!r}' for name, value in given)})"


@dataclass(frozen=True)
class Compiled:
    """How a model is going to be compiled, for a plan that is made before that.

    >>> Compiled("model", backend="aot_eager")
    Compiled(what='model', backend='aot_eager')

    Raises:
        ModeError: if a field has a value that is not permitted.
    """

    what: Literal["blocks", "model"] = "blocks"
    """`blocks`: each block, by `block.compile()` or `torch.compile(block)`. `model`: all of it, as one graph."""
    backend: str = "inductor"
    """The compiler's backend, as `torch.compile` names it."""

    def __post_init__(self) -> None:
        if self.what not in ("blocks", "model"):
            raise ModeError(f"what = {self.what!r} is not known. Expected 'blocks' or 'model'.")
        if not isinstance(self.backend, str):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
            raise ModeError(
                f"backend = {self.backend!r} is not the name of a backend. Expected one such as 'inductor'. To plan "
                "for a backend of your own, compile the model first: it is seen."
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class Split:
    """What is computed in pieces of tokens, because no decision about blocks lowers it.

    >>> Split(loss=16)
    Split(loss=16)
    >>> Split(loss="auto", parts={"mlp": 8})
    Split(loss='auto', parts={'mlp': 8})

    Raises:
        ModeError: if a field has a value that is not permitted.
    """

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    loss: int | Literal["auto"] | None = None
    """Into how many chunks of tokens the logits and the loss are divided. `auto`: chunks of about the bytes of the
    head's input. None: they are not."""
    parts: dict[str, int] = field(default_factory=dict[str, int], hash=False)
    """Parts of each block that treat every token by itself -> in how many pieces of tokens they run, forward and
    backward. A part is a target such as `mlp` or `routed_experts`, or a glob over module paths."""
    head: str | None = None
    """The module that makes the logits. None: it is found."""
    gradients: Literal["forward", "backward"] = "forward"
    """When the gradients of a loss are found: together with it, chunk by chunk, or in the backward pass, for which the
    logits of each chunk are computed a second time. The first is faster; the second holds no gradient of the head
    between the two, and permits several backward passes."""
    exact: bool = False
    """Keep the order of every sum, so that training stays bitwise what it was. It is refused where a weight of the head
    or of a part takes a gradient, which is a sum over tokens; adapters on a frozen model need none there."""

    def __post_init__(self) -> None:
        if self.gradients not in ("forward", "backward"):
            raise ModeError(f"gradients = {self.gradients!r} is not known. Expected 'forward' or 'backward'.")
        if type(self.exact) is not bool:
            raise ModeError(f"exact = {self.exact!r} is not permitted. Write True or False.")
        if self.loss is not None and self.loss != "auto" and (type(self.loss) is not int or self.loss < 1):
            raise ModeError(f"loss = {self.loss!r} is not permitted. Expected a number of chunks, or 'auto'.")
        if self.head is not None and not isinstance(self.head, str):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
            raise ModeError(f"head = {self.head!r} is not the path of a module. Expected one such as 'lm_head'.")
        parts = cast(object, self.parts)
        if not isinstance(parts, Mapping):
            raise ModeError(f"parts = {parts!r} is not permitted. Expected names and numbers, as in {{'mlp': 8}}.")
        for name, num in cast("Mapping[object, object]", parts).items():
            if not isinstance(name, str) or type(num) is not int or num < 1:
                raise ModeError(
                    f"parts = {parts!r}: {name!r}: {num!r} is not permitted. Expected a target or a module, and in how "
                    "many pieces of tokens it runs, as in {'mlp': 8}."
                )
        object.__setattr__(self, "parts", dict(self.parts))
        if self.loss is None and not self.parts:
            raise ModeError("a Split without loss and parts splits nothing. Write Split(loss=16), or parts={'mlp': 8}.")
        if self.loss is None and self.head is not None:
            raise ModeError(f"head = {self.head!r} is about the loss, which is not split. Write Split(loss=16, ...).")

    def __repr__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) not in (f.default, {})]
        return f"Split({', '.join(f'{name}={value!r}' for name, value in given)})"


def check_split(split: object, *, with_plan: bool = False) -> None:
    """Refuse what is not a Split, and a Split together with a plan.

    >>> check_split(Split(loss=16))
    """
    if not isinstance(split, Split):
        raise ModeError(f"split = {split!r} is not a Split. Write split=actmem.Split(loss=16).")
    if with_plan:
        raise ModeError(
            f"split = {split!r} cannot be combined with a plan, which says itself what is split. Make the plan with "
            f"it: actmem.fit(..., split={split!r})."
        )
