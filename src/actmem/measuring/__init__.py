"""Exact bytes, FLOPs and time of one training step.

This package only observes: it changes no model, holds no tensor and decides nothing. `measure` is the entry point.
"""

from typing import TYPE_CHECKING

from actmem.doors import on_first_use

if TYPE_CHECKING:
    from actmem.measuring.allocations import number_bytes, workspace_bytes
    from actmem.measuring.flops import Formula, flop_formula
    from actmem.measuring.inplace_formulas import Formulas, called_from_python, is_listed, watches
    from actmem.measuring.ledger import (
        ByteLedger,
        Entry,
        device_of,
        is_foreign,
        state_tensors,
        storages_of,
        tensors_in,
        watching_resizes,
    )
    from actmem.measuring.machine import measure_machine
    from actmem.measuring.measurement import CATEGORIES, PHASES, AllocatorCheck, Measurement, PeakOp, Sample
    from actmem.measuring.meter import measure
    from actmem.measuring.phases import NO_TASK, current_task

__all__ = [
    "CATEGORIES",
    "NO_TASK",
    "PHASES",
    "AllocatorCheck",
    "ByteLedger",
    "Entry",
    "Formula",
    "Formulas",
    "Measurement",
    "PeakOp",
    "Sample",
    "called_from_python",
    "current_task",
    "device_of",
    "flop_formula",
    "is_foreign",
    "is_listed",
    "measure",
    "measure_machine",
    "number_bytes",
    "state_tensors",
    "storages_of",
    "tensors_in",
    "watches",
    "watching_resizes",
    "workspace_bytes",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "actmem.measuring.allocations": "number_bytes workspace_bytes",
        "actmem.measuring.flops": "Formula flop_formula",
        "actmem.measuring.inplace_formulas": "Formulas called_from_python is_listed watches",
        "actmem.measuring.ledger": "ByteLedger Entry device_of is_foreign state_tensors storages_of tensors_in "
        "watching_resizes",
        "actmem.measuring.machine": "measure_machine",
        "actmem.measuring.measurement": "CATEGORIES PHASES AllocatorCheck Measurement PeakOp Sample",
        "actmem.measuring.meter": "measure",
        "actmem.measuring.phases": "NO_TASK current_task",
    },
)
