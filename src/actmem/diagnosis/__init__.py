"""Find out what goes wrong in a training, from its model, its settings or an error message.

`doctor` looks at a model and its settings, and changes nothing:

- `findings.py` is what comes out: findings, and the report.
- `setups.py` reads the settings: arguments of trainers, configurations of accelerate and DeepSpeed.
- `regions.py` finds what recomputes in a model already, and what else the checks ask of it.
- `configured.py`, `combinations.py`, `modelled.py` and `sources.py` are the checks that run nothing; `bugs.py` are
  known defects by version.
- `trial_steps.py` and `repeated_step.py` are the checks that run steps, if an example is given.
- `examination.py` runs the checks.

`explain` reads an error message, without torch:

- `recompute_errors.py` and `surroundings.py` are the data: torch's checkpoint, and what surrounds it. The causes of
  actmem's own errors are in `actmem.error_causes`, which the engine reads too.
- `memory_errors.py` reads the numbers of an out-of-memory error.
- `explanation.py` finds the causes that fit a text and the shapes that it lists, and ranks them.
"""

from typing import TYPE_CHECKING

from actmem.doors import on_first_use

if TYPE_CHECKING:
    from actmem.diagnosis.examination import doctor
    from actmem.diagnosis.explanation import CAUSES, Candidate, Explanation, explain
    from actmem.diagnosis.findings import Diagnosis, Finding, Skipped
    from actmem.diagnosis.setups import read_settings

__all__ = [
    "CAUSES",
    "Candidate",
    "Diagnosis",
    "Explanation",
    "Finding",
    "Skipped",
    "doctor",
    "explain",
    "read_settings",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "actmem.diagnosis.examination": "doctor",
        "actmem.diagnosis.explanation": "CAUSES Candidate Explanation explain",
        "actmem.diagnosis.findings": "Diagnosis Finding Skipped",
        "actmem.diagnosis.setups": "read_settings",
    },
)
