"""How long a user waits at a cold shell: for the import, for `--help`, and for a plan. Each in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
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
    for _ in range(num_repetitions):
        took[torch_alone].append(_seconds("-c", "import torch"))
        took[both].append(_seconds("-c", "import torch, actmem; actmem.apply, actmem.measure, actmem.verify"))
    extra = median((b - a) / a for a, b in zip(took[torch_alone], took[both], strict=True))
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
    started = perf_counter()
    _output(*arguments)
    return perf_counter() - started


def _output(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout
