"""Every error that actmem raises on purpose.

The errors, and the builtin that each can also be caught as::

    ActmemError (Exception)
    ├── ModeError (ValueError)          what was asked is not permitted
    │   ├── PlanError                   a plan file that cannot be read, is newer, or belongs to another model
    │   └── SnapshotError               a memory snapshot that cannot be read, or is none
    ├── DeviceError (ValueError)        a device is not known, or a figure of it is missing or wrong
    ├── StructureError (ValueError)     the blocks of a model were not found, or are ambiguous
    ├── ApplyError (RuntimeError)       a mode cannot be applied to this model in its present state
    ├── BudgetError (RuntimeError)      no plan fits the budget, or a batch is larger than the plan was made for
    ├── ReplayError (RuntimeError)      a dropped value could not be recomputed
    │   ├── VersionError                a tensor it depends on was changed in place in the meantime
    │   ├── FreedStorageError           the memory of a tensor it depends on has been freed
    │   └── SelfCheckError              it was recomputed, but with different bits
    ├── OffloadError (RuntimeError)     bytes could not be moved: no room, an I/O error, other bytes than were written
    └── UnsupportedError (RuntimeError) a torch feature that cannot be combined with actmem

Each message says what was found, what is permitted, why (in one clause), and how to fix it.
"""

from __future__ import annotations

from collections.abc import Sequence


class ActmemError(Exception):
    """Common base of all errors that actmem raises on purpose."""


class ModeError(ActmemError, ValueError):
    """A mode or a rule asks for something that is not permitted."""


class PlanError(ModeError):
    """A plan cannot be read, has a newer version, or belongs to another model."""


class SnapshotError(ModeError):
    """A memory snapshot of torch cannot be read, is none, or names something to be imported."""


class DeviceError(ActmemError, ValueError):
    """A device is not known, one of its figures is missing, or a device file cannot be read."""


class StructureError(ActmemError, ValueError):
    """The blocks of a model were not found, or there are several candidates."""


class ApplyError(ActmemError, RuntimeError):
    """A mode cannot be applied to this model in its present state."""


class BudgetError(ActmemError, RuntimeError):
    """No plan fits the memory budget, or a batch is larger than the one the plan was made for."""

    smallest_bytes: int | None = None
    """The smallest peak that was found, where no plan fits."""
    smallest_decisions: Sequence[Sequence[str]] | None = None
    """The decisions with that peak, for each call of each block, if they are to be followed to the letter."""

    def with_lines(self, lines: Sequence[str]) -> BudgetError:
        """Return the same error with more to say."""
        if not lines:
            return self
        more = BudgetError("\n".join([str(self), *lines]))
        more.smallest_bytes, more.smallest_decisions = self.smallest_bytes, self.smallest_decisions
        return more


class ReplayError(ActmemError, RuntimeError):
    """A dropped value could not be recomputed."""


class VersionError(ReplayError):
    """A value that a replay depends on was changed in place."""


class FreedStorageError(ReplayError):
    """The memory of a value was freed or resized before a replay could read it."""


class SelfCheckError(ReplayError):
    """A replayed value differs from the one that was dropped."""


class OffloadError(ActmemError, RuntimeError):
    """Bytes could not be moved out or back: no room, an I/O error, or not the bytes that were written."""


class UnsupportedError(ActmemError, RuntimeError):
    """A torch feature is in use that cannot be combined with actmem."""
