"""Build the model and the batch that a command line names.

A model is built in, described by a transformers `config.json` (of a file, or in the local cache of the Hub), or made by
a function of the user's. A model that is only planned for, not run, is built on the meta device, where weights take no
memory.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from actmem import catalogue
from actmem.catalogue import VisionConfig
from actmem.cli.commands import Loading
from actmem.cli.failures import Mistakes
from actmem.cli.tuning_options import adapted, check_adapters
from actmem.errors import ModeError, UnsupportedError
from actmem.offloading import available_bytes
from actmem.ops import did_you_mean
from actmem.units import size

__all__ = ["Loaded", "check_model", "load", "runs_on"]

Batch = dict[str, Any] | tuple[Any, ...]
_SEQUENCE, _TINY_SEQUENCE = 8192, 64
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_STATES = 4
"""The least that training takes, in multiples of the parameters: parameters, gradients and two AdamW states."""
_FORMS = (
    "a built-in name ({names}), tiny:NAME for its small form, the path to a config.json, or package.module:function"
)


@dataclass(frozen=True)
class Loaded:
    """A model with a batch that it can be called with."""

    name: str
    """As typed on the command line."""
    source: Literal["built-in", "tiny", "config", "function"]
    model: nn.Module
    batch: Batch
    make_batch: Callable[[int | None, int | None], Batch]
    """Makes a batch of another size, given as (sequence, batch)."""
    loss: Callable[[Any], Tensor] | None = None
    """Computes the loss from the output, for a model that does not return its loss."""


def check_model(asked: Loading, mistakes: Mistakes) -> None:
    """Record mistakes in the model's name and the batch sizes, before anything is built.

    >>> mistakes = Mistakes()
    >>> check_model(Loading("llama-9", sequence=0), mistakes)
    >>> mistakes.raise_all()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    actmem.errors.ModeError: this command has 2 mistakes:
    1. --sequence 0 is not permitted. Expected a whole number of at least 1.
    2. there is no model 'llama-9'. Expected ...
    """
    sizes = {"sequence": asked.sequence, "batch": asked.batch}
    for what, number in sizes.items():
        with mistakes.noted():
            if number is not None and number < 1:
                raise ModeError(f"--{what} {number} is not permitted. Expected a whole number of at least 1.")
    name = asked.model
    with mistakes.noted():
        check_adapters(asked)
    with mistakes.noted():
        if _is_config(name) or _is_hub_name(name):
            _config_file(name)
        elif _is_function(name):
            function = _function(name)
            for what, number in sizes.items():
                with mistakes.noted():
                    _check_takes(function, name, what, number)
        else:
            _catalogued(name)


def _is_config(name: str) -> bool:
    return not _is_built_in(name) and (name.endswith(".json") or Path(name).exists())


def _is_function(name: str) -> bool:
    return ":" in name and not _is_built_in(name) and not _is_config(name)


def _is_hub_name(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None and not _is_config(name)


def _is_built_in(name: str) -> bool:
    return name in catalogue.names() or name.startswith("tiny:")


def load(asked: Loading, *, place: str = "meta", untouched: bool = False) -> Loaded:
    """Build the requested model, in training mode, and a batch for it.

    Args:
        asked: the model's name and the batch sizes, as typed.
        place: "meta" to plan without running; otherwise the device to run on.
        untouched: keep a config's `use_cache` setting. By default it is turned off, so training fills no cache.

    Raises:
        ModeError: there is no such model, or it does not take one of the options.
        UnsupportedError: the model cannot be built here.
    """
    mistakes = Mistakes()
    check_model(asked, mistakes)
    mistakes.raise_all()
    if _is_config(asked.model) or _is_hub_name(asked.model):
        return _from_config(asked, place, untouched=untouched)
    return _from_function(asked, place) if _is_function(asked.model) else _built_in(asked, place)


def runs_on(asked: str | None) -> str:
    """Return the device that real steps run on: the one asked for, else the accelerator, else the CPU.

    >>> runs_on("cpu")
    'cpu'

    Raises:
        ModeError: torch does not know the device, or this machine does not have it.
    """
    if asked is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if found is None else found.type
    if asked.partition(":")[0] == "meta":
        raise ModeError("--on meta has no memory, so nothing runs there. Write --on cpu, or plan instead: actmem fit.")
    try:
        torch.empty(1, device=asked)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise ModeError(f"--on {asked} cannot be used here: {first} Write --on cpu, or omit --on.") from None
    return asked


# --- built-in models --------------------------------------------------------------------------------------------------


def _catalogued(asked: str) -> str:
    """Return the catalogue name of a built-in or tiny: model, or raise a ModeError that lists the names."""
    name = asked.removeprefix("tiny:")
    if name not in catalogue.names():
        forms = _FORMS.format(names=", ".join(catalogue.names()))
        raise ModeError(f"there is no model {asked!r}. Expected {forms}.{did_you_mean(name, catalogue.names())}")
    return name


def _built_in(asked: Loading, place: str) -> Loaded:
    is_tiny = asked.model.startswith("tiny:")
    name = _catalogued(asked.model)
    config = catalogue.tiny(name) if is_tiny else catalogue.find(name)
    dtype = _dtype(asked, "float32" if is_tiny else config.dtype)
    usual = None if isinstance(config, VisionConfig) else _TINY_SEQUENCE if is_tiny else _SEQUENCE

    def make_batch(sequence: int | None, batch: int | None) -> Batch:
        return catalogue.example(config, batch=batch or 1, sequence=sequence or usual, device=place)

    batch = make_batch(asked.sequence, asked.batch)
    if place != "meta":
        _check_room(catalogue.build(config, dtype=dtype), asked.model, place)
    model = adapted(catalogue.build(config, device=place, dtype=dtype).train(), asked)
    return Loaded(asked.model, "tiny" if is_tiny else "built-in", model, batch, make_batch)


# --- transformers -----------------------------------------------------------------------------------------------------


def _cached_config(name: str) -> Path:
    """Return the config of a Hub model from the local cache. Nothing is downloaded."""
    forms = _FORMS.format(names=", ".join(catalogue.names()))
    try:
        hub: Any = importlib.import_module("huggingface_hub")  # only here: it is not required
    except ImportError:
        hub = None
    found = None if hub is None else hub.try_to_load_from_cache(name, "config.json")
    if not isinstance(found, str):
        raise ModeError(
            f"{name!r} is not in the local cache of the Hugging Face Hub, and nothing is downloaded. Expected {forms}. "
            f"To use this one, download it. Run: hf download {name} config.json"
        )
    return Path(found)


def _config_file(name: str) -> Path:
    if _is_hub_name(name):
        return _cached_config(name)
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ModeError(f"there is no file {str(path)!r}. Name an existing transformers config.json.")
    return path


def _from_config(asked: Loading, place: str, *, untouched: bool) -> Loaded:
    path = _config_file(asked.model)
    try:
        library: Any = importlib.import_module("transformers")  # only here: it is not required
    except ImportError:
        raise UnsupportedError(
            f"{str(path)!r} describes a transformers model, but transformers is not installed. Run: pip install "
            "transformers"
        ) from None
    try:
        config: Any = library.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  # its checks raise their own exception classes
        raise ModeError(
            f"{str(path)!r} is not a transformers config: {' '.join(str(error).split())[:300]} Expected a config.json "
            "with a model_type that transformers knows."
        ) from None
    config.use_cache = untouched and getattr(config, "use_cache", False)
    given: Any = getattr(config, "dtype", None)
    dtype = _dtype(asked, str(given).removeprefix("torch.") if given is not None else "bfloat16")

    def built(where: str) -> nn.Module:
        with torch.device(where):
            return library.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)

    try:
        model = built("meta")
    except ValueError as error:  # transformers has no language model of this type
        raise ModeError(
            f"{str(path)!r} is not a causal language model: {str(error).splitlines()[0][:200]} Write a function that "
            "builds the model and a batch, and name it as package.module:function."
        ) from None
    if place != "meta":
        _check_room(model, asked.model, place)
        model = built(place)
    text: Any = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    usual = min(_SEQUENCE, most or _SEQUENCE)
    words: Any = cast(Any, model).get_input_embeddings()
    learned = any(
        isinstance(m, nn.Embedding) and m is not words and m.num_embeddings in (most, (most or 0) + 2)
        for m in model.modules()
    )

    def make_batch(sequence: int | None, batch: int | None) -> Batch:
        if learned and most is not None and (sequence or 0) > most:
            raise ModeError(
                f"sequence = {sequence} exceeds the {most} positions of {asked.model}. Write --sequence "
                f"{most}, or --most {most} for actmem largest."
            )
        return _tokens(text.vocab_size, sequence or usual, batch or 1, place)

    model = adapted(model.train(), asked)
    return Loaded(asked.model, "config", model, make_batch(asked.sequence, asked.batch), make_batch)


def _tokens(vocab_size: int, sequence: int, batch: int, place: str) -> Batch:
    shape = batch, sequence
    if place == "meta":
        ids = torch.empty(shape, dtype=torch.int64, device="meta")
    else:
        ids = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(place)
    return {"input_ids": ids, "labels": ids.clone()}


# --- user functions ---------------------------------------------------------------------------------------------------


def _from_function(asked: Loading, place: str) -> Loaded:
    function = _function(asked.model)

    def call(sequence: int | None, batch: int | None) -> tuple[Any, Batch | None, Any]:
        given = {"sequence": sequence, "batch": batch}
        for what, number in given.items():
            _check_takes(function, asked.model, what, number)
        return _parts(function(**{k: v for k, v in given.items() if v is not None}), asked.model)

    model, batch, loss = call(asked.sequence, asked.batch)
    if asked.dtype is not None:
        model = model.to(_dtype(asked, ""))
    if place != "meta":
        if any(p.is_meta for p in model.parameters()):
            raise ModeError(
                f"{asked.model} returned a model on the meta device, which cannot be run. Build it with weights, or "
                "only plan for it: actmem fit."
            )
        model = model.to(place)

    def make_batch(sequence: int | None, batch: int | None) -> Batch:
        return _checked(call(sequence, batch)[1], asked.model)

    model = adapted(model.train(), asked)
    return Loaded(asked.model, "function", model, _moved(_checked(batch, asked.model), place), make_batch, loss)


def _check_takes(function: Callable[..., Any], name: str, what: str, number: int | None) -> None:
    if number is not None and what not in inspect.signature(function).parameters:
        raise ModeError(
            f"{name} takes no argument {what!r}, so {what} = {number} cannot be passed to it. Write "
            f"def {function.__name__}({what}), or omit --{what} or --vary {what}."
        )


def _function(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ModeError(
            f"{module_name!r} in {name!r} is not a module name. Write package.module:function, as in an import: "
            "my_project.train:make for my_project/train.py in this folder."
        )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise ModeError(
            f"there is no module {error.name!r}, for {name!r}. This folder and the installed packages were searched. "
            "Write package.module:function."
        ) from None
    found = getattr(module, attribute, None)
    if not callable(found):
        own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise ModeError(
            f"{module_name} has no function {attribute!r}. It has: {', '.join(own) or 'none'}."
            f"{did_you_mean(attribute, own)}"
        )
    return found


def _parts(found: Any, name: str) -> tuple[nn.Module, Batch | None, Callable[[Any], Tensor] | None]:
    parts = list(cast(tuple[Any, ...], found)) if isinstance(found, tuple) else [found]
    model, batch, loss = (*parts, None, None, None)[:3]
    if len(parts) > 3 or not isinstance(model, nn.Module) or (loss is not None and not callable(loss)):
        kinds = ", ".join(type(part).__name__ for part in parts) or "nothing"
        raise ModeError(
            f"{name} returned {kinds}. Expected a model, (model, batch) or (model, batch, loss), where the batch is a "
            "dict for model(**batch) or a tuple for model(*batch)."
        )
    return model, cast(Batch | None, batch), cast(Callable[[Any], Tensor] | None, loss)


def _checked(batch: Any, name: str) -> Batch:
    if isinstance(batch, (dict, tuple)):
        return cast(Batch, batch)
    found = "no batch" if batch is None else f"a {type(batch).__name__} as batch"
    raise ModeError(
        f"{name} returned a model and {found}. Return (model, batch), where the batch is a dict for model(**batch) or "
        "a tuple for model(*batch)."
    )


def _moved(batch: Any, place: str) -> Any:
    if place == "meta":
        return batch
    if isinstance(batch, dict):
        return {k: _moved(v, place) for k, v in cast(dict[Any, Any], batch).items()}
    if isinstance(batch, (tuple, list)):
        made: Any = type(cast(object, batch))
        return made(_moved(v, place) for v in cast(list[Any], batch))
    return batch.to(place) if isinstance(batch, Tensor) else batch


# --- common to all sources --------------------------------------------------------------------------------------------


def _dtype(asked: Loading, usual: str) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, asked.dtype or usual))


def _check_room(model: nn.Module, name: str, place: str) -> None:
    """Refuse a model whose training state would not fit in the free memory."""
    needed = _STATES * sum(p.nbytes for p in model.parameters())
    room = available_bytes() if torch.device(place).type == "cpu" else torch.accelerator.get_memory_info()[0]
    if room is not None and needed > room:
        small = f", or run its small form: tiny:{name}" if name in catalogue.names() else ""
        raise ModeError(
            f"{name} needs at least {size(needed)} for parameters, gradients and optimizer state, but {place} has only "
            f"{size(room)} free. Plan for it instead, which takes no memory: actmem fit {name}{small}."
        )
