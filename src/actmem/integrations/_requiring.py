"""Saying what to install where a library is missing."""

from __future__ import annotations

from actmem.errors import ActmemError

__all__ = ["MissingLibraryError", "missing"]


class MissingLibraryError(ActmemError, ImportError):
    """Say that an integration needs a library that is not installed."""


def missing(module: str, *packages: str) -> MissingLibraryError:
    """Return the error for an integration whose library could not be imported.

    >>> missing("transformers", "transformers", "accelerate")
    MissingLibraryError('actmem.integrations.transformers needs transformers and accelerate, ... pip install ...')
    """
    return MissingLibraryError(
        f"actmem.integrations.{module} needs {' and '.join(packages)}, which could not be imported. Install what is "
        f"missing: pip install {' '.join(packages)}"
    )
