"""What the environment sets of the caching allocator, compared with what a plan assumes."""

import os
from collections.abc import Mapping
from dataclasses import replace

from actmem.allocator.alloc_conf import AllocatorSettings
from actmem.errors import ModeError

__all__ = ["environment_note"]

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where torch looks, in this order: the first that is set counts."""


def environment_note(settings: AllocatorSettings, environment: Mapping[str, str] = os.environ) -> str | None:
    """Say that the environment has other settings than these. None: it has the same, or none.

    A plan does not depend on the environment, which may be another one where it is applied.

    >>> environment_note(AllocatorSettings(), {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8"})
    >>> print(environment_note(AllocatorSettings(), {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}))
    PYTORCH_ALLOC_CONF is 'max_split_size_mb:128' here, and the plan is for the defaults. If training runs with it, plan for it: allocator='max_split_size_mb:128'
    """  # noqa: E501  # a doctest output does not wrap
    name = next((name for name in _VARIABLES if name in environment), None)
    if name is None:
        return None
    said = f"{name} is {environment[name]!r} here, and the plan is for {settings.text or 'the defaults'}"
    try:
        found = AllocatorSettings.parse(environment[name], tie=settings.tie)
    except ModeError as error:
        return f"{said}. If training runs with it, it may reserve another number of bytes: {error}"
    if replace(found, garbage_collection_threshold=0.0) == replace(settings, garbage_collection_threshold=0.0):
        return None
    line = f"allocator={found.text!r}" if found.text else "leave allocator out"
    return f"{said}. If training runs with it, plan for it: {line}"
