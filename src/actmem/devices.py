"""What accelerators and links can do: memory, FLOP/s and bandwidth, each with its source. Does not import torch.

NOTE [ figures of devices ]
All figures are in `devices.toml`, each with the document that states it. A user's own file, named by the environment
variable ACTMEM_DEVICES or by `path`, has the same format and overrides it figure by figure. A missing figure is None
here, and code that needs it raises an error that says how to supply it. Nothing is guessed.

The size of a card is the one its driver reports, and not all of it is torch's: `outside_bytes` is what the driver and
the process itself take.

A datasheet states peaks. `attainable` says what fraction of a peak real kernels reach, for matrix products, for memory
and for the link to the host. Each is one constant with its reason, not a model of a kernel. Both files may set it, for
all devices or for one.
"""

import functools
import os
import tomllib
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from actmem.errors import DeviceError

__all__ = ["DEVICES_VARIABLE", "THIS_MACHINE", "Attainable", "Device", "Fabric", "Nvme", "device", "known_devices"]

DEVICES_VARIABLE = "ACTMEM_DEVICES"
"""The environment variable that names the user's own device file."""

THIS_MACHINE = "this-machine"
"""The key of the device that is measured rather than looked up."""

_FIGURES_OF = {
    "bfloat16": ("bf16", "fp32"),
    "float16": ("fp16", "bf16", "fp32"),  # the makers state one rate for both
    "float32": ("fp32",),
    "tf32": ("tf32", "fp32"),
    "float64": ("fp64", "fp32"),
}
_BANDWIDTH_ONLY = ("int", "uint", "bool", "qint", "quint", "bits")


@dataclass(frozen=True)
class Attainable:
    """The fraction of a peak that real kernels reach. The default, for measured figures, uses them unchanged."""

    matmul: float = 1.0
    """Fraction of the peak FLOP/s that matrix products reach."""
    memory: float = 1.0
    """Fraction of the memory bandwidth that operators reach which only move bytes."""
    link: float = 1.0
    """Fraction of the host link's bandwidth that large copies reach."""


@dataclass(frozen=True)
class Nvme:
    """Speed of a class of drives."""

    key: str
    """Name in the file, such as `pcie5-x4`."""
    read_bytes_per_second: float
    """Speed of sequential reads."""
    write_bytes_per_second: float
    """Speed of sequential writes."""


@dataclass(frozen=True)
class Fabric:
    """What joins the devices of a job."""

    key: str
    """Name in the file, such as `dgx-h100`."""
    peers: int
    """Devices that are joined directly: those of one host, or of one rack."""
    peer_bytes_per_second: float
    """Peak bandwidth of a device to its peers, in one direction."""
    network_bytes_per_second: float
    """Peak bandwidth of a device to those of other hosts, in one direction."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one device can do. See NOTE [ figures of devices ].

    >>> h100 = device("h100-80gb")
    >>> h100.memory_bytes, h100.flops_per_second["bf16"]
    (85520809984, 989400000000000.0)
    >>> print(h100.sources["memory_bytes_per_second"])
    NVIDIA H100 datasheet, SXM: 3.35 TB/s
    """

    key: str
    """Name in the file, such as `h100-80gb`."""
    name: str
    """Full name."""
    memory_bytes: int
    """Memory size, as the driver reports it."""
    flops_per_second: dict[str, float] = field(hash=False)
    """Dense peaks by number format: those of `bf16`, `fp16`, `fp32`, `tf32`, `fp8` and `fp64` that are stated."""
    memory_bytes_per_second: float | None = None
    """Peak memory bandwidth."""
    host_link_bytes_per_second: float | None = None
    """Peak bandwidth of the link to host memory, in one direction."""
    driver_bytes: int | None = None
    """What the driver keeps of the memory for itself."""
    context_bytes: int | None = None
    """What a training process takes outside torch's allocator: its context, and the kernels of its libraries."""
    blas_workspace_bytes: int | None = None
    """What torch allocates for the matrix library, once for each thread that multiplies. None: a device that torch's
    caching allocator is not known to serve."""
    nvme: Nvme | None = None
    """The drives that its host is assumed to have."""
    fabric: Fabric | None = None
    """What is assumed to join it to others of its kind."""
    attainable: Attainable = Attainable()
    """What fraction of these peaks is reached."""
    sources: dict[str, str] = field(default_factory=dict[str, str], hash=False)
    """Source of each figure, by its path, such as `flops_per_second.bf16`."""

    @property
    def has_caching_allocator(self) -> bool:
        """Whether tensors are served by torch's caching allocator: a CUDA or ROCm device."""
        return self.blas_workspace_bytes is not None

    def tensors_only(self) -> "Device":
        """Return a device of the same speed where a budget is a bound on the bytes of tensors alone, as on a CPU.

        >>> device("h100-80gb").tensors_only().has_caching_allocator
        False
        """
        return replace(self, driver_bytes=None, context_bytes=None, blas_workspace_bytes=None)

    @property
    def outside_bytes(self) -> int:
        """What never reaches torch's allocator: kept by the driver, or taken by the process itself.

        >>> device("h100-80gb").outside_bytes // 2**20
        1228
        """
        return (self.driver_bytes or 0) + (self.context_bytes or 0)

    def seconds(self, flops: int, moved_bytes: int, dtype: str) -> float:
        """Return the roofline time of an operator: computing or moving bytes, whichever takes longer.

        `dtype` is the name of a torch dtype, such as `bfloat16` or `float8_e4m3fn`, or `tf32`. One without a figure
        counts at the rate of fp32. For integers, only the moved bytes count.

        >>> device("h100-80gb").seconds(flops=2 * 4096**3, moved_bytes=3 * 4096**2 * 2, dtype="bfloat16")
        0.000198...

        Raises:
            DeviceError: if the device lacks a figure that this needs, or the dtype is not known.
        """
        rate = self.flop_rate(dtype) if flops else None
        computing = flops / (rate * self.attainable.matmul) if rate is not None else 0.0
        if not moved_bytes:
            return computing
        bandwidth = self._figure("memory_bytes_per_second", self.memory_bytes_per_second, "2e12")
        return max(computing, moved_bytes / (bandwidth * self.attainable.memory))

    def flop_rate(self, dtype: str) -> float | None:
        """Return the peak FLOP/s for a dtype; None for integers, whose arithmetic is not counted.

        >>> device("a100-80gb").flop_rate("float16") == device("a100-80gb").flops_per_second["bf16"]
        True

        Raises:
            DeviceError: if the device has neither this figure nor the one for fp32, or the dtype is not known.
        """
        dtype = dtype.removeprefix("torch.")
        if dtype.startswith(_BANDWIDTH_ONLY):
            return None
        names = _FIGURES_OF.get(dtype) or _other_figures(dtype)
        for name in names:
            if name in self.flops_per_second:
                return self.flops_per_second[name]
        return self._figure(f"flops_per_second.{names[0]}", None, "100e12")

    def offload_rate(self, to: Literal["host", "disk"]) -> float:
        """Return the sustained bandwidth for offloading, in bytes per second, in each direction.

        Bytes on the way to disk pass the host link too; the slowest of link, reads and writes counts.

        >>> device("h100-80gb").offload_rate("host"), device("h100-80gb").offload_rate("disk")
        (51200000000.0, 10000000000.0)

        Raises:
            DeviceError: if the device lacks a figure that this needs.
        """
        rates: list[float] = []
        if to == "host" or self.host_link_bytes_per_second is not None:  # a CPU reaches its disk without such a link
            link = self._figure("host_link_bytes_per_second", self.host_link_bytes_per_second, "64e9")
            rates.append(link * self.attainable.link)
        if to == "disk":
            if self.nvme is None:
                raise self._missing("nvme", '"pcie4-x4"')
            rates += [self.nvme.read_bytes_per_second, self.nvme.write_bytes_per_second]
        return min(rates)

    def peer_rate(self, reach: int) -> float:
        """Return the sustained bandwidth to other devices, in bytes per second, in each direction.

        Args:
            reach: how many neighbouring ranks it spans: beyond the peers, the network counts.

        >>> device("h100-80gb").peer_rate(8), device("h100-80gb").peer_rate(16)
        (360000000000.0, 40000000000.0)

        Raises:
            DeviceError: if it is not known what joins such devices.
        """
        if self.fabric is None:
            raise self._missing("fabric", '"dgx-h100"')
        near = reach <= self.fabric.peers
        return self.attainable.link * (
            self.fabric.peer_bytes_per_second if near else self.fabric.network_bytes_per_second
        )

    def _figure(self, name: str, value: float | None, example: str) -> float:
        if value is None:
            raise self._missing(name, example)
        return value

    def _missing(self, name: str, example: str) -> DeviceError:
        return DeviceError(
            f"the device {self.key!r} ({self.name}) has no figure for {name}: no sourced figure is known, and none is "
            f"guessed. Add it in a file of your own, named by {DEVICES_VARIABLE} or by path, with these lines:\n"
            f"[devices.{self.key}]\n{name} = {example}"
        )


def device(which: "str | Device", *, path: str | os.PathLike[str] | None = None) -> Device:
    """Return a device by its name. A `Device` is returned unchanged.

    >>> device("rtx4090-24gb").name
    'NVIDIA GeForce RTX 4090 24 GB'
    >>> device("H100 80GB").key
    'h100-80gb'

    Args:
        which: A key of `known_devices()`, in upper or lower case.
        path: A file of your own, as for `known_devices`.

    Raises:
        DeviceError: if there is no such device; the message lists the closest names.
    """
    if isinstance(which, Device):
        return which
    known = known_devices(path=path)
    if not isinstance(cast(object, which), str):
        raise DeviceError(f"device = {which!r} is not a device. Expected one of {', '.join(known)}, or a Device.")
    found = {_plain(key): key for key in known}.get(_plain(which))
    if found is not None:
        return known[found]
    near = _nearest(which, known)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise DeviceError(
        f"device {which!r} is not known. Permitted: {', '.join(known)}.{hint} Add others in a file of your "
        f"own, named by {DEVICES_VARIABLE} or by path, as [devices.NAME] with name, memory_bytes and what is known."
    )


def known_devices(*, path: str | os.PathLike[str] | None = None) -> dict[str, Device]:
    """Return all devices by key: the built-in ones, and those in the user's file.

    >>> sorted(known_devices())[:3]
    ['a10-24gb', 'a100-40gb', 'a100-80gb']

    Args:
        path: Your own TOML file, which overrides the built-in one. Default: the one that ACTMEM_DEVICES names, if any.

    Raises:
        DeviceError: if that file cannot be read or has a mistake; the message says where.
    """
    path = path if path is not None else os.environ.get(DEVICES_VARIABLE) or None
    if path is None:
        return dict(_built_in())
    where = os.fspath(path)
    try:
        own = tomllib.loads(Path(where).read_text(encoding="utf-8"))
    except OSError as error:
        raise DeviceError(
            f"the device file {where!r} cannot be read: {error.strerror or error}. It is named by "
            f"{DEVICES_VARIABLE} or by path. Name a TOML file that exists, or leave both out."
        ) from error
    except ValueError as error:  # covers both the TOML reader's errors and UTF-8 errors
        raise DeviceError(
            f"the device file {where!r} cannot be read as TOML: {error}. "
            "Expected tables such as [devices.NAME], with lines such as memory_bytes = 80_000_000_000."
        ) from error
    return _read(_over(_document(), own), where, default_source=where)


# --- reading a file ---------------------------------------------------------------------------------------------------

_Name = Annotated[str, Field(min_length=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Figure(_Table):
    value: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
    source: _Name

    @model_validator(mode="before")
    @classmethod
    def _plain_number(cls, given: Any, info: ValidationInfo) -> Any:
        """Accept a plain number too. In a user's file, a figure without a source gets the file itself as its source."""
        table = {"value": given} if isinstance(given, (int, float)) and not isinstance(given, bool) else given
        if info.context is None or not isinstance(table, dict):
            return table
        return {"source": info.context, **cast(dict[str, Any], table)}


class _Bytes(_Figure):
    value: Annotated[float, Field(ge=1, allow_inf_nan=False, strict=True)]


class _Fraction(_Figure):
    value: Annotated[float, Field(gt=0, le=1, strict=True)]


class _Rates(_Table):
    bf16: _Figure | None = None
    fp16: _Figure | None = None
    fp32: _Figure | None = None
    tf32: _Figure | None = None
    fp8: _Figure | None = None
    fp64: _Figure | None = None


class _Attainable(_Table):
    matmul: _Fraction | None = None
    memory: _Fraction | None = None
    link: _Fraction | None = None


class _Nvme(_Table):
    read_bytes_per_second: _Figure
    write_bytes_per_second: _Figure


class _Fabric(_Table):
    peers: _Bytes
    peer_bytes_per_second: _Figure
    network_bytes_per_second: _Figure


class _Device(_Table):
    name: _Name
    memory_bytes: _Bytes
    flops_per_second: _Rates = _Rates()
    memory_bytes_per_second: _Figure | None = None
    host_link_bytes_per_second: _Figure | None = None
    driver_bytes: _Bytes | None = None
    context_bytes: _Bytes | None = None
    blas_workspace_bytes: _Bytes | None = None
    nvme: str | None = None
    fabric: str | None = None
    attainable: _Attainable = _Attainable()


class _File(_Table):
    devices: dict[_Name, _Device]
    nvme: dict[_Name, _Nvme]
    fabric: dict[_Name, _Fabric]
    attainable: _Attainable


def _document() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))


@functools.cache
def _built_in() -> dict[str, Device]:
    return _read(_document(), "devices.toml")


def _read(document: dict[str, Any], where: str, default_source: str | None = None) -> dict[str, Device]:
    try:
        file = _File.model_validate(document, context=default_source)
    except ValidationError as error:
        raise DeviceError(f"the device file {where!r}: {_explain(error)}") from None
    return {key: _made(key, table, file, where) for key, table in file.devices.items()}


def _made(key: str, table: _Device, file: _File, where: str) -> Device:
    if table.nvme is not None and table.nvme not in file.nvme:
        raise DeviceError(
            f"the device file {where!r}: devices.{key}.nvme = {table.nvme!r} is not a known class of drives. "
            f"Permitted: {', '.join(file.nvme)}. To use another, add a table [nvme.{table.nvme}]."
        )
    if table.fabric is not None and table.fabric not in file.fabric:
        raise DeviceError(
            f"the device file {where!r}: devices.{key}.fabric = {table.fabric!r} is not known. "
            f"Permitted: {', '.join(file.fabric)}. To use another, add a table [fabric.{table.fabric}]."
        )
    drive = None if table.nvme is None else file.nvme[table.nvme]
    fabric = None if table.fabric is None else file.fabric[table.fabric]
    own, common = _given(table.attainable), _given(file.attainable)
    rates, attainable = _given(table.flops_per_second), {**common, **own}
    figures = {
        "memory_bytes": table.memory_bytes,
        "memory_bytes_per_second": table.memory_bytes_per_second,
        "host_link_bytes_per_second": table.host_link_bytes_per_second,
        "driver_bytes": table.driver_bytes,
        "context_bytes": table.context_bytes,
        "blas_workspace_bytes": table.blas_workspace_bytes,
        **{f"flops_per_second.{name}": figure for name, figure in rates.items()},
        **{f"attainable.{name}": figure for name, figure in attainable.items()},
        **{f"nvme.{name}": figure for name, figure in (_given(drive) if drive is not None else {}).items()},
        **{f"fabric.{name}": figure for name, figure in (_given(fabric) if fabric is not None else {}).items()},
    }
    return Device(
        key=key,
        name=table.name,
        memory_bytes=int(table.memory_bytes.value),
        flops_per_second={name: figure.value for name, figure in rates.items()},
        memory_bytes_per_second=_value(table.memory_bytes_per_second),
        host_link_bytes_per_second=_value(table.host_link_bytes_per_second),
        driver_bytes=_whole(table.driver_bytes),
        context_bytes=_whole(table.context_bytes),
        blas_workspace_bytes=_whole(table.blas_workspace_bytes),
        nvme=None
        if drive is None
        else Nvme(cast(str, table.nvme), drive.read_bytes_per_second.value, drive.write_bytes_per_second.value),
        fabric=None
        if fabric is None
        else Fabric(
            cast(str, table.fabric),
            int(fabric.peers.value),
            fabric.peer_bytes_per_second.value,
            fabric.network_bytes_per_second.value,
        ),
        attainable=Attainable(**{name: figure.value for name, figure in attainable.items()}),
        sources={name: figure.source for name, figure in figures.items() if figure is not None},
    )


def _given(table: _Rates | _Attainable | _Nvme | _Fabric) -> dict[str, _Figure]:
    return {name: figure for name, figure in table if figure is not None}


def _value(figure: _Figure | None) -> float | None:
    return None if figure is None else figure.value


def _whole(figure: _Figure | None) -> int | None:
    return None if figure is None else int(figure.value)


def _over(under: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Merge one document into another, table by table; a figure replaces a figure as a whole."""
    merged = dict(under)
    for name, entry in upper.items():
        below = merged.get(name)
        both_tables = isinstance(below, dict) and isinstance(entry, dict) and "value" not in entry
        merged[name] = _over(cast(dict[str, Any], below), cast(dict[str, Any], entry)) if both_tables else entry
    return merged


def _explain(error: ValidationError) -> str:
    """Describe the first error that pydantic found, in our own words."""
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    figure = path[:-1] if path[-1] in ("value", "source") else path
    where, name, found = ".".join(figure), figure[-1], first["input"]
    match first["type"]:
        case "extra_forbidden":
            permitted = _permitted(path[:-1])
            near = get_close_matches(path[-1], permitted, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            return f"{'.'.join(path)} is not a known key. Permitted: {', '.join(permitted)}.{hint}"
        case "missing":
            if path[-1] == "value":
                return f'{where} has no value. Write {name} = {{ value = 1e12, source = "where it is from" }}.'
            example = (
                '"what it is"' if name == "name" else '"where it is from"' if path[-1] == "source" else "80_000_000_000"
            )
            return f"{'.'.join(path)} is missing. Add the line {path[-1]} = {example} to [{'.'.join(path[:-1])}]."
        case "less_than_equal":
            return f"{where} = {found!r} is more than the whole peak. Expected a fraction up to 1.0, such as 0.8."
        case "string_too_short" if path[-1] == "[key]":
            return f"{path[0]} has a table without a name. Write [{path[0]}.NAME]."
        case "string_type" | "string_too_short":
            return f'{".".join(path)} = {found!r} is not a string. Write {path[-1]} = "...".'
        case _ if _is_table(path):
            return f"{where} = {found!r} is not a table. Expected [{where}], with {', '.join(_permitted(path))}."
        case _:
            example = "0.8" if "attainable" in figure else "80_000_000_000" if name == "memory_bytes" else "1e12"
            return f"{where} = {found!r} is not a figure. Expected a number above 0. Write {name} = {example}."


def _permitted(path: list[str]) -> list[str]:
    """Return the keys that a table of the file may have; for a figure, `value` and `source`."""
    match path:
        case []:
            table = _File
        case ["devices", _]:
            table = _Device
        case ["devices", _, "flops_per_second"]:
            table = _Rates
        case ["devices", _, "attainable"] | ["attainable"]:
            table = _Attainable
        case ["nvme", _]:
            table = _Nvme
        case ["fabric", _]:
            table = _Fabric
        case ["devices"] | ["nvme"] | ["fabric"]:
            return ["one table for each name"]
        case _:
            table = _Figure
    return list(table.model_fields)


def _is_table(path: list[str]) -> bool:
    return _permitted(path) != list(_Figure.model_fields)


# --- names ------------------------------------------------------------------------------------------------------------


def _other_figures(dtype: str) -> tuple[str, ...]:
    if dtype.startswith("float8"):
        return ("fp8", "fp32")
    if dtype.startswith(("float", "complex")):
        return ("fp32",)
    raise DeviceError(
        f"dtype = {dtype!r} is not known. Expected the name of a torch dtype, such as {', '.join(_FIGURES_OF)}, "
        "float8_e4m3fn or int64; tf32 means float32 on tensor cores."
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _nearest(name: str, known: dict[str, Device]) -> list[str]:
    """Return what a mistyped name may mean: the same family, else a longer name, else a family spelled similarly."""
    families = {key: key.split("-")[0].lower() for key in known}
    words = name.lower().replace("_", " ").replace("-", " ").split()
    same = [key for key, family in families.items() if family in words]
    if not same and len(_plain(name)) > 1:
        same = [key for key in known if _plain(name) in _plain(key)]
    if not same:
        alike = [near for word in words for near in get_close_matches(word, families.values(), n=1)]
        same = [key for key, family in families.items() if family in alike]
    return same
