"""Decide for every activation that training holds on to: save it, recompute it, or offload it.

>>> import torch, actmem
>>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
>>> with actmem.apply(model, actmem.Full()) as applied:
...     model(torch.randn(2, 8)).sum().backward()
...     print(applied)
<Applied Full() on 3 blocks>
"""

from actmem.applying import Applied, apply
from actmem.devices import Device, device, known_devices
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

__all__ = [
    "ActmemError",
    "Applied",
    "ApplyError",
    "Budget",
    "BudgetError",
    "CompilerBudget",
    "Device",
    "DeviceError",
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
    "every_second",
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
