"""What planning a large job takes: its CPU seconds and its memory, each in a process of its own.

The same model is planned over many ranks and over an eighth of them: what is left of a rank is smaller, and nothing
else changes, so planning must not take longer.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

from benchmarks.outcome import Bound, Outcome

SECONDS_LIMIT, MEMORY_LIMIT = 90, 4
GROWTH_LIMIT = 1.15
"""Seconds with all ranks over those with an eighth of them, and so for the memory."""


@dataclass(frozen=True)
class Job:
    """A model of the catalogue, how it is spread, and what a card may use."""

    model: str
    pp: int
    tp: int
    dp_shard: int
    budget: str = "72GiB"
    sequence: int = 8192
    num_layers: int | None = None
    ep: int = 1
    device: str = "h100-80gb"

    @property
    def world(self) -> int:
        """How many ranks it has."""
        return self.pp * self.tp * self.dp_shard

    def __str__(self) -> str:
        spread = f"PP {self.pp}, " + (f"EP {self.ep}" if self.ep > 1 else f"TP {self.tp}") + f", FSDP {self.dp_shard}"
        return f"{self.model}, {self.world} ranks ({spread}), {self.sequence} tokens, {self.budget} on {self.device}"


JOBS = (
    *(Job("llama-3.1-405b", 16, 8, 128), Job("llama-3.1-405b", 16, 8, 16), Job("llama-3.1-70b", 4, 8, 16)),
    # Exchanges between experts are not run again, so what each microbatch in flight received is held.
    Job("deepseek-v3", 16, 1, 1024, "130GiB", 4096, ep=64, device="h200-141gb"),
)


def run(jobs: Sequence[Job] = JOBS) -> Outcome:
    """Plan every job. The first two are the same model on many ranks and on fewer."""
    outcome = Outcome("jobs", {"threads": 1})
    found = [_planned(job) for job in jobs]
    for job, figures in zip(jobs, found, strict=True):
        name = str(job)
        outcome.exact[name] = {key: figures[key] for key in ("num_plans", "log_entries")}
        outcome.measured[name] = {key: figures[key] for key in ("profile_s", "total_s", "process_bytes", "step_ratio")}
        outcome.bounds += [
            Bound(f"{name}: CPU seconds of profiles and plans", figures["total_s"], SECONDS_LIMIT, exact=False),
            Bound(f"{name}: memory of the process, GiB", figures["process_bytes"] / 2**30, MEMORY_LIMIT, exact=False),
        ]
    many, few = found[:2]
    outcome.bounds += [
        Bound("entries of the log, with more ranks / with fewer", many["log_entries"] / few["log_entries"], 1.0),
        Bound("CPU seconds, with more ranks / with fewer", many["total_s"] / few["total_s"], GROWTH_LIMIT, exact=False),
        Bound(
            "memory, with more ranks / with fewer",
            many["process_bytes"] / few["process_bytes"],
            GROWTH_LIMIT,
            exact=False,
        ),
    ]
    return outcome


def _planned(job: Job) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.jobs", json.dumps(dataclasses.asdict(job))]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"planning {job} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def planned(job: Job) -> dict[str, Any]:
    """Profile every stage of a job and plan for all of them, in this process."""
    import torch

    import actmem
    from actmem.catalogue import build, example

    torch.set_num_threads(1)  # threads that wait for others take CPU seconds too
    layout = actmem.Layout(pp=job.pp, tp=job.tp, dp_shard=job.dp_shard, ep=job.ep, sequence_parallel=job.tp > 1)
    model, batch = build(job.model, layers=job.num_layers), example(job.model, sequence=job.sequence)
    begun = process_time()
    stages = actmem.profile_stages(model, batch, layout, together=True)
    profiled = process_time()
    plan = actmem.fit_job([stage.profile for stage in stages], budget=job.budget, device=job.device)
    assert plan.predicted is not None
    return {
        "num_plans": len(plan.parts),
        "log_entries": sum(len(stage.profile.log) for stage in stages),
        "profile_s": profiled - begun,
        "total_s": process_time() - begun,
        "step_ratio": plan.predicted.step_time_ratio,
        "process_bytes": most_resident_bytes(),
    }


def most_resident_bytes() -> int:
    """Read Linux's figure for this process: `ru_maxrss` would include the process that started it."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(planned(Job(**json.loads(sys.argv[1])))))
