"""Decide for every activation that training holds on to: save it, recompute it, or offload it.

>>> import torch, actmem
>>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
>>> with actmem.apply(model, actmem.Full()) as applied:
...     model(torch.randn(2, 8)).sum().backward()
...     print(applied)
<Applied Full() on 3 blocks>
"""

# Names are imported on first use: the command line answers before torch is loaded, and the solver is loaded only for
# planning.

from typing import TYPE_CHECKING

from actmem.doors import on_first_use

if TYPE_CHECKING:
    from actmem.applying import Applied, apply, offload
    from actmem.decision_rules import Rule
    from actmem.devices import Device, device, known_devices
    from actmem.diagnosis import Diagnosis, Explanation, doctor, explain
    from actmem.engine import replayable
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
        SnapshotError,
        StructureError,
        UnsupportedError,
        VersionError,
    )
    from actmem.expert_loads import ExpertCounts, Quantile
    from actmem.job_plan import JobPlan
    from actmem.layout import Layout
    from actmem.measuring import Measurement, measure
    from actmem.modes import (
        Budget,
        FromPlan,
        Full,
        OffloadActivations,
        Rules,
        SaveEverything,
        Selective,
        Targets,
        every_second,
    )
    from actmem.parallelism import StageProfile, profile_layout, profile_stages
    from actmem.plan import Plan
    from actmem.planner import Frontier, Largest, Ranks, fit, fit_job, frontier, largest, ranks
    from actmem.profiles import Profile
    from actmem.profiling import profile, profile_rank
    from actmem.reporting import Report, Trace
    from actmem.settings import Compiled, Offload, Split
    from actmem.simulation import Prediction, predict
    from actmem.step_recorder import record
    from actmem.verification import Verification, verify


__version__ = "0.1.0.dev0"

__all__ = [
    "ActmemError",
    "Applied",
    "ApplyError",
    "Budget",
    "BudgetError",
    "Compiled",
    "Device",
    "DeviceError",
    "Diagnosis",
    "ExpertCounts",
    "Explanation",
    "FreedStorageError",
    "FromPlan",
    "Frontier",
    "Full",
    "JobPlan",
    "Largest",
    "Layout",
    "Measurement",
    "ModeError",
    "Offload",
    "OffloadActivations",
    "OffloadError",
    "Plan",
    "PlanError",
    "Prediction",
    "Profile",
    "Quantile",
    "Ranks",
    "ReplayError",
    "Report",
    "Rule",
    "Rules",
    "SaveEverything",
    "Selective",
    "SelfCheckError",
    "SnapshotError",
    "Split",
    "StageProfile",
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
    "fit_job",
    "frontier",
    "known_devices",
    "largest",
    "measure",
    "offload",
    "predict",
    "profile",
    "profile_layout",
    "profile_rank",
    "profile_stages",
    "ranks",
    "record",
    "replayable",
    "verify",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "actmem.applying": "Applied apply offload",
        "actmem.decision_rules": "Rule",
        "actmem.devices": "Device device known_devices",
        "actmem.diagnosis": "Diagnosis Explanation doctor explain",
        "actmem.engine": "replayable",
        "actmem.errors": (
            "ActmemError ApplyError BudgetError DeviceError FreedStorageError ModeError OffloadError "
            "PlanError ReplayError SelfCheckError SnapshotError StructureError UnsupportedError VersionError"
        ),
        "actmem.expert_loads": "ExpertCounts Quantile",
        "actmem.job_plan": "JobPlan",
        "actmem.layout": "Layout",
        "actmem.measuring": "Measurement measure",
        "actmem.modes": "Budget FromPlan Full OffloadActivations Rules SaveEverything Selective Targets every_second",
        "actmem.parallelism": "StageProfile profile_layout profile_stages",
        "actmem.plan": "Plan",
        "actmem.planner": "Frontier Largest Ranks fit fit_job frontier largest ranks",
        "actmem.profiles": "Profile",
        "actmem.profiling": "profile profile_rank",
        "actmem.reporting": "Report Trace",
        "actmem.settings": "Compiled Offload Split",
        "actmem.simulation": "Prediction predict",
        "actmem.step_recorder": "record",
        "actmem.verification": "Verification verify",
    },
    rooms="allocator",
)
