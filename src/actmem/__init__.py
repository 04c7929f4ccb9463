"""Decide for every activation that training holds on to: save it, recompute it, or offload it.

>>> import torch, actmem
>>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
>>> with actmem.apply(model, actmem.Full()) as applied:
...     model(torch.randn(2, 8)).sum().backward()
...     print(applied)
<Applied Full() on 3 blocks>
"""

# A name is imported when it is first asked for: the command line answers before torch is loaded, and the solver is
# loaded by those who plan.

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actmem.applying import Applied, apply
    from actmem.causes import Explanation, explain
    from actmem.devices import Device, device, known_devices
    from actmem.diagnosis import Diagnosis, doctor
    from actmem.engine.declaring import replayable
    from actmem.errors import (
        ActmemError,
        ApplyError,
        BudgetError,
        DeviceError,
        FreedStorageError,
        ModeError,
        OffloadError,
        PlanError,
        ReplayError,
        SelfCheckError,
        StructureError,
        UnsupportedError,
        VersionError,
    )
    from actmem.measuring import Measurement, measure
    from actmem.modes import (
        Budget,
        CompilerBudget,
        FromPlan,
        Full,
        OffloadActivations,
        Rules,
        SaveEverything,
        Selective,
        Targets,
        every_second,
    )
    from actmem.plan import Plan, Predicted, Rule
    from actmem.planner import Frontier, Largest, Prediction, fit, frontier, largest, predict
    from actmem.profiles import Profile
    from actmem.profiling import profile
    from actmem.report import Report, Trace
    from actmem.sending import offload
    from actmem.settings import Offload
    from actmem.verification import Verification, verify

__version__ = "0.1.0.dev0"

__all__ = [
    "ActmemError",
    "Applied",
    "ApplyError",
    "Budget",
    "BudgetError",
    "CompilerBudget",
    "Device",
    "DeviceError",
    "Diagnosis",
    "Explanation",
    "FreedStorageError",
    "FromPlan",
    "Frontier",
    "Full",
    "Largest",
    "Measurement",
    "ModeError",
    "Offload",
    "OffloadActivations",
    "OffloadError",
    "Plan",
    "PlanError",
    "Predicted",
    "Prediction",
    "Profile",
    "ReplayError",
    "Report",
    "Rule",
    "Rules",
    "SaveEverything",
    "Selective",
    "SelfCheckError",
    "StructureError",
    "Targets",
    "Trace",
    "UnsupportedError",
    "Verification",
    "VersionError",
    "apply",
    "device",
    "doctor",
    "every_second",
    "explain",
    "fit",
    "frontier",
    "known_devices",
    "largest",
    "measure",
    "offload",
    "predict",
    "profile",
    "replayable",
    "verify",
]

_HOMES = {
    "actmem.applying": (
        "Applied",
        "apply",
    ),
    "actmem.causes": (
        "Explanation",
        "explain",
    ),
    "actmem.devices": (
        "Device",
        "device",
        "known_devices",
    ),
    "actmem.diagnosis": (
        "Diagnosis",
        "doctor",
    ),
    "actmem.engine.declaring": ("replayable",),
    "actmem.errors": (
        "ActmemError",
        "ApplyError",
        "BudgetError",
        "DeviceError",
        "FreedStorageError",
        "ModeError",
        "OffloadError",
        "PlanError",
        "ReplayError",
        "SelfCheckError",
        "StructureError",
        "UnsupportedError",
        "VersionError",
    ),
    "actmem.measuring": (
        "Measurement",
        "measure",
    ),
    "actmem.modes": (
        "Budget",
        "CompilerBudget",
        "FromPlan",
        "Full",
        "OffloadActivations",
        "Rules",
        "SaveEverything",
        "Selective",
        "Targets",
        "every_second",
    ),
    "actmem.plan": (
        "Plan",
        "Predicted",
        "Rule",
    ),
    "actmem.planner": (
        "Frontier",
        "Largest",
        "Prediction",
        "fit",
        "frontier",
        "largest",
        "predict",
    ),
    "actmem.profiles": ("Profile",),
    "actmem.profiling": ("profile",),
    "actmem.report": (
        "Report",
        "Trace",
    ),
    "actmem.sending": ("offload",),
    "actmem.settings": ("Offload",),
    "actmem.verification": (
        "Verification",
        "verify",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'actmem' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
