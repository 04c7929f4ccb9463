"""Run benchmarks, print and write their results, fail if a bound is broken: `python -m benchmarks.run [name ...]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import compile as compiling
from benchmarks import jobs, memory, offload, offload_simulated, overhead, plan, start, targets, times
from benchmarks.outcome import RESULTS, Outcome
from benchmarks.table import DOCUMENT, update

BENCHMARKS: dict[str, Callable[[], Outcome]] = {
    "memory": memory.run,
    "overhead": overhead.run,
    "targets": targets.run,
    "compile": compiling.run,
    "offload": offload.run,
    "offload_simulated": offload_simulated.run,
    "plan": plan.run,
    "jobs": jobs.run,
    "start": start.run,
    "times": times.run,
}
PAGES: dict[str, Callable[[Path], None]] = {"targets": targets.update, "compile": compiling.update}
"""Functions that write the tables of a benchmark with its own page, from the folder of the results."""


def main(names: Sequence[str], *, results: Path = RESULTS, document: Path = DOCUMENT) -> int:
    """Run the named benchmarks, or all. Return 1 if any bound is broken, 2 for an unknown name."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"unknown: {', '.join(unknown)}. Benchmarks: {', '.join(BENCHMARKS)}.", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 200)
    broken: list[str] = []
    for name in names or BENCHMARKS:
        outcome = BENCHMARKS[name]()
        outcome.print(console)
        console.print(f"written: {outcome.write(results)}\n")
        if name in PAGES:
            PAGES[name](results)
        broken += [f"{name}: {b.name} = {b.value:.4f}, at most {b.limit}" for b in outcome.bounds if not b.kept]
    update(document, results)
    for line in broken:
        print(f"broken bound: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
