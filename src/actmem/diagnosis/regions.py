"""The model as the checks see it: existing recomputation, blocks, adapters, configuration."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from actmem.diagnosis.findings import NotMadeError
from actmem.diagnosis.setups import Setup
from actmem.errors import StructureError
from actmem.modes import Mode
from actmem.plan import Plan
from actmem.structure import Block, find_blocks
from actmem.torchcompat import named_modules

__all__ = ["SWITCH", "WRAPPER", "Case", "Region"]

SWITCH = "transformers' gradient checkpointing"
"""Name of transformers' own switch in findings."""
WRAPPER = "torch's checkpoint_wrapper"
"""Name of torch's wrapper in findings; FSDP's setting adds it."""
_DDP = "DistributedDataParallel"


@dataclass(frozen=True)
class Region:
    """A module that torch's checkpoint already wraps."""

    path: str
    module: nn.Module = field(repr=False)
    by: str
    """`SWITCH` or `WRAPPER`."""
    options: Mapping[str, Any]
    """Keyword arguments of its checkpoint function."""


@dataclass(frozen=True)
class Case:
    """A model and its training settings: the input of every check."""

    model: nn.Module | None
    setup: Setup
    mode: Mode | Plan | None = None
    policy: tuple[Any, ...] = ()
    pattern: str | Sequence[str] | None = None
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    example: Any = None
    loss: Callable[[Any], Tensor] | None = None

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The modules that torch's checkpoint already wraps."""
        return tuple(_regions(self.model)) if self.model is not None else ()

    @property
    def checkpointing(self) -> str | None:
        """Where torch's checkpointing is enabled, by a setting or in the model; None if it is not."""
        if self.setup.checkpointing or self.setup.fsdp_checkpointing:
            return self.setup.checkpointing or self.setup.fsdp_checkpointing
        return f"{self.regions[0].by} at {self.regions[0].path or 'the model itself'}" if self.regions else None

    @property
    def reentrant(self) -> str | None:
        """Where the reentrant form is chosen; None if it is not, or if that is unknown."""
        if self.setup.reentrant is not None:
            return self.setup.reentrant
        for region in self.regions:
            if region.options.get("use_reentrant", True):
                return f"use_reentrant = True in {region.by} at {region.path or 'the model itself'}"
        return None

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """The modules with their paths, each once."""
        return named_modules(self.the_model)

    @property
    def the_model(self) -> nn.Module:
        """The model; a check that needs one is skipped if there is none."""
        if self.model is None:
            raise NotMadeError("no model was given")
        return self.model

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks; a check that needs them is skipped if they cannot be found."""
        try:
            return find_blocks(self.the_model, self.pattern)
        except StructureError as error:
            raise NotMadeError(f"the blocks were not found: {str(error).splitlines()[0]}") from error

    @property
    def adapters(self) -> str | None:
        """Where adapters (PEFT) were found; None if there are none."""
        for path, module in self.modules:
            if isinstance(getattr(module, "peft_config", None), Mapping):
                return f"adapters ({type(module).__name__} at {path or 'the model itself'})"
        return None

    @property
    def data_parallel(self) -> str | None:
        """Where DDP was found; None if it was not."""
        if self.setup.ddp is None and self.model is not None:
            return next((f"{_DDP} at {p or 'the model itself'}" for p, m in self.modules if _kind(m) == _DDP), None)
        return self.setup.ddp

    def config(self, name: str) -> list[tuple[str, Any]]:
        """Return the values of an option in the model's transformers configurations, each with its location."""
        found: dict[int, tuple[str, Any]] = {}
        for path, module in self.modules:
            config = getattr(module, "config", None)
            for suffix, part in (("", config), (".text_config", getattr(config, "text_config", None))):
                value = getattr(part, name, None)
                if value is not None and id(part) not in found:
                    found[id(part)] = f"{f'model.{path}'.strip('.')}.config{suffix}.{name}", value
        return list(found.values())

    @contextmanager
    def without_regions(self) -> Generator[None]:
        """Turn off torch's checkpointing inside a `with` block."""
        flagged: list[Any] = [r.module for r in self.regions if r.by == SWITCH]
        wrapped: list[tuple[Any, Any]] = [
            (r.module, vars(r.module)["checkpoint_fn"]) for r in self.regions if r.by == WRAPPER
        ]
        try:
            for module in flagged:
                module.gradient_checkpointing = False
            for module, _ in wrapped:
                module.checkpoint_fn = _called
            yield
        finally:
            for module in flagged:
                module.gradient_checkpointing = True
            for module, function in wrapped:
                module.checkpoint_fn = function


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _regions(model: nn.Module) -> Generator[Region]:
    for path, module in named_modules(model):
        if getattr(module, "gradient_checkpointing", False) is True:
            yield Region(path, module, SWITCH, _keywords(getattr(module, "_gradient_checkpointing_func", None)))
        if hasattr(module, "_checkpoint_wrapped_module") and "checkpoint_fn" in vars(module):
            yield Region(path, module, WRAPPER, _keywords(vars(module)["checkpoint_fn"]))


def _keywords(function: Any) -> Mapping[str, Any]:
    return function.keywords if isinstance(function, partial) else {}


def _kind(module: nn.Module) -> str:
    return type(module).__name__
