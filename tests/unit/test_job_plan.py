"""The plan of a job: what a file of it may say, and which rank gets what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import actmem
from actmem.job_plan import JobRecord, RankPlan

PLAN = actmem.Plan(
    [actmem.Rule("recompute", layers="0"), actmem.Rule("save")], ["layers.0", "layers.1"], "9f2c", "Full()"
)
JOB = actmem.JobPlan(
    (RankPlan((0, 1), (0, 3), PLAN, 0.75, 3, 1), RankPlan((2, 3), (1, 2), PLAN, 1.0, 2)),
    world=8,
    predicted=JobRecord(1.5, 1.0, 1.25, 2**30, "H100"),
)


def test_a_job_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    JOB.save(tmp_path / "job.json")
    assert actmem.JobPlan.load(tmp_path / "job.json") == JOB
    assert actmem.JobPlan.from_json(JOB.to_json()).to_json() == JOB.to_json()


def test_its_text_has_the_step_its_bound_and_each_part() -> None:
    lines = str(JOB).splitlines()
    assert lines[1] == (
        "predicted step: 1.5 s, 1.5000x of saving everything on H100; "
        "lower bound within the budget 1.2500x (gap 25.00 %)"
    )
    assert (
        "ranks 0 and 1, stages 0 and 3: 3 microbatches in flight, 1 waiting for weights, busy for 75 % of the step"
        in lines
    )


def test_each_rank_and_each_stage_gets_its_part() -> None:
    assert JOB.for_rank(2) is JOB.for_stage(1) is PLAN
    with pytest.raises(actmem.PlanError, match="they are 0 to 7"):
        JOB.for_rank(8)
    with pytest.raises(actmem.PlanError, match=r"rank 5 was not planned for by itself.*ranks 0, 1, 2 and 3"):
        JOB.for_rank(5)
    with pytest.raises(
        actmem.PlanError, match="stage = 4 is not in the job's plan, which has the stages 0, 1, 2 and 3"
    ):
        JOB.for_stage(4)


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(JOB.to_json()), **fields})


def part(**fields: Any) -> str:
    return changed(parts=[{**json.loads(JOB.to_json())["parts"][0], **fields}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is not the plan of a job: it has no list of parts"),
        (PLAN.to_json(), r"actmem\.Plan\.load\(path\)"),
        (changed(version=2), "version = 2 is not known"),
        (changed(wolrd=3), "wolrd is not a known key.*Did you mean 'world'"),
        (changed(world="8"), r"world = '8' is not permitted"),
        (part(plan={"version": 1, "rules": [{"decision": "drop"}]}), r"parts\[0\]\.plan: rules\[0\]\.decision"),
        (part(ranks=[0, 0]), r"ranks \[0\] are in two parts"),
        (part(busy=None), r"parts\[0\]\.busy = None is not permitted"),
        (changed(parts=[{}]), r"parts\[0\]\.ranks is missing"),
        (changed(predicted={"step_seconds": 1.0}), r"predicted\.plain_seconds is missing"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(actmem.PlanError, match=message):
        actmem.JobPlan.from_json(text)


def test_a_job_plan_in_the_place_of_a_plan_is_explained(tmp_path: Path) -> None:
    JOB.save(tmp_path / "job.json")
    with pytest.raises(actmem.PlanError, match=r"JobPlan\.load\(path\)\.for_rank\(rank\)"):
        actmem.Plan.load(tmp_path / "job.json")
