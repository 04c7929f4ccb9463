"""Look at a model, and at the settings of its training, for what is known to go wrong. Nothing here changes a model.

- `findings.py` is what comes out: findings, and the report.
- `setups.py` reads the settings: arguments of trainers, configurations of accelerate and DeepSpeed.
- `regions.py` finds what recomputes in a model already, and what else the checks ask of it.
- `configured.py`, `modelled.py`, `sources.py` are the checks that run nothing; `bugs.py` are known defects by version.
- `running.py` and `repeating.py` are the checks that run steps, if an example is given.
- `examining.py` runs the checks.
"""

from actmem.diagnosis.examining import doctor
from actmem.diagnosis.findings import Diagnosis, Finding, Skipped
from actmem.diagnosis.setups import read_settings

__all__ = ["Diagnosis", "Finding", "Skipped", "doctor", "read_settings"]
