"""How long a user waits at a cold shell: for the import, for `--help`, and for a plan. Each in its own process.

Imports are compared by the processor's time, the least of several: other processes do not change it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from math import inf
from statistics import median
from time import perf_counter

from benchmarks.outcome import Bound, Outcome

FIT = (
    "fit",
    "llama-3.1-8b",
    "--sequence",
    "8192",
    "--device",
    "h100-80gb",
    "--budget",
    "72GiB",
    "--optimizer",
    "adamw_fused",
)
IMPORT_LIMIT = 0.25
FIT_LIMIT = 20.0


def run(*, num_repetitions: int = 7, fit: Sequence[str] = FIT) -> Outcome:
    """Time cold starts, in turn, and compare with the bounds."""
    outcome = Outcome("start", {"num_repetitions": num_repetitions, "command": f"actmem {' '.join(fit)}"})
    took: dict[str, list[float]] = {"import torch": [], "import torch, then actmem and all that training needs": []}
    torch_alone, both = took
    least = [inf, inf]
    for _ in range(num_repetitions):
        alone = _times("-c", "import torch")
        then = _times("-c", "import torch, actmem; actmem.apply, actmem.measure, actmem.verify")
        took[torch_alone].append(alone[0])
        took[both].append(then[0])
        least = [min(least[0], alone[1]), min(least[1], then[1])]
    extra = (least[1] - least[0]) / least[0]
    took["actmem --help"] = [_seconds("-m", "actmem", "--help") for _ in range(num_repetitions)]
    took["actmem fit, the plan and the frontier"] = [_seconds("-m", "actmem", *fit)]
    for name, seconds in took.items():
        outcome.measured[name] = {"wall_seconds": median(seconds)}
    found = json.loads(_output("-m", "actmem", *fit, "--json"))
    outcome.exact["the plan"] = {
        "peak_bytes": found["peak_bytes"],
        "budget_bytes": found["budget_bytes"],
        "num_rules": len(found["plan"]["rules"]),
    }
    fits = found["peak_bytes"] / found["budget_bytes"]
    outcome.bounds.append(Bound("the plan: peak / budget", fits, 1.0))
    outcome.bounds.append(Bound("import: time beyond torch's / torch's", extra, IMPORT_LIMIT, exact=False))
    waited = outcome.measured["actmem fit, the plan and the frontier"]["wall_seconds"]
    outcome.bounds.append(Bound("actmem fit: seconds", waited, FIT_LIMIT, exact=False))
    return outcome


def _seconds(*arguments: str) -> float:
    return _times(*arguments)[0]


def _times(*arguments: str) -> tuple[float, float]:
    """Return the seconds that a process takes, and those of the processor."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
    _output(*arguments)
    ended, after = perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended - started, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def _output(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout
