"""Name everything that can go wrong.

All errors of actmem, and the builtin that each can also be caught as::

    ActmemError (Exception)
    ├── ModeError (ValueError)          what was asked is not permitted
    │   └── PlanError                   a plan file that cannot be read, is newer, or belongs to another model
    ├── DeviceError (ValueError)        a device is not known, or a figure of it is missing or wrong
    ├── StructureError (ValueError)     the blocks of a model were not found, or are ambiguous
    ├── ApplyError (RuntimeError)       this model cannot be applied to as it is now
    ├── BudgetError (RuntimeError)      no plan keeps a budget, or a batch does not fit the one that a plan was made for
    ├── ReplayError (RuntimeError)      a dropped value could not be brought back
    │   ├── VersionError                something it needs was changed in place since
    │   ├── FreedStorageError           the memory of something it needs is gone
    │   └── SelfCheckError              it came back, but with other bits
    ├── OffloadError (RuntimeError)     bytes could not be moved: no room, an I/O error, other bytes than were written
    └── UnsupportedError (RuntimeError) a torch feature that does not go together with actmem

Each message says what was found, what is permitted, why in one clause, and what repairs it.
"""


class ActmemError(Exception):
    """Be the common base of all errors that actmem raises on purpose."""


class ModeError(ActmemError, ValueError):
    """Say that a mode or a rule asks for something that is not permitted."""


class PlanError(ModeError):
    """Say that a plan cannot be read, is of a newer version, or belongs to another model."""


class DeviceError(ActmemError, ValueError):
    """Say that a device is not known, that a figure of it is missing, or that a file of devices cannot be read."""


class StructureError(ActmemError, ValueError):
    """Say that the blocks of a model were not found, or that there are several candidates."""


class ApplyError(ActmemError, RuntimeError):
    """Say that a mode cannot be applied to this model in its present state."""


class BudgetError(ActmemError, RuntimeError):
    """Say that no plan keeps a memory budget, or that a batch does not fit the one that a plan was made for."""


class ReplayError(ActmemError, RuntimeError):
    """Say that a dropped value could not be brought back."""


class VersionError(ReplayError):
    """Say that a value was changed in place after a replay came to depend on it."""


class FreedStorageError(ReplayError):
    """Say that the memory of a value was freed or resized before a replay could read it."""


class SelfCheckError(ReplayError):
    """Say that a replayed value differs from the one that was dropped."""


class OffloadError(ActmemError, RuntimeError):
    """Say that bytes could not be moved out or back: no room, an I/O error, or not the bytes that were written."""


class UnsupportedError(ActmemError, RuntimeError):
    """Say that a torch feature in use does not go together with actmem."""
