"""Run every check that applies and collect the findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from actmem.diagnosis import combinations, configured, modelled, trial_steps
from actmem.diagnosis.bugs import known_bugs
from actmem.diagnosis.findings import SEVERITIES, Diagnosis, Finding, NotMadeError, Skipped
from actmem.diagnosis.regions import Case
from actmem.diagnosis.setups import Source, read_setup
from actmem.diagnosis.sources import saved_tensors_twice
from actmem.errors import ModeError
from actmem.modes import Mode
from actmem.plan import Plan

__all__ = ["CHECKS", "STEPS", "doctor"]

Check = Callable[[Case], Iterator[Finding]]

CHECKS: dict[str, Check] = {
    "recomputing-twice": configured.recomputing_twice,
    "stacked-offloaders": combinations.stacked_offloaders,
    "every-nth-layer": combinations.every_nth,
    "unknown-keys": combinations.unknown_settings,
    "nothing-trained": combinations.nothing_trained,
    "evaluating": combinations.evaluating,
    "inert-block": configured.inert_block,
    "reentrant": combinations.reentrant,
    "ddp-reentrant": configured.ddp_reentrant,
    "adapters-reentrant": configured.adapters_reentrant,
    "cuda-graphs": configured.cuda_graphs,
    "zero3-frozen": configured.zero3_frozen,
    "known-bugs": known_bugs,
    "random-numbers": modelled.random_numbers,
    "batch-norm": modelled.batch_norm,
    "shared-keys-values": modelled.shared_keys_values,
    "routing": modelled.routing,
    "packets": modelled.packets,
    "autocast-shared": modelled.autocast_shared,
    "saved-tensors-twice": saved_tensors_twice,
    "towers": modelled.towers,
    "graph-kept": modelled.graph_kept,
    "cache-on": modelled.cache_on,
    "renamed": modelled.renamed,
}
"""The checks that run nothing."""

STEPS: dict[str, Check] = {
    "repeatable": trial_steps.repeatable,
    "graph-after-step": trial_steps.graph_after_step,
    "gradients": trial_steps.gradients,
    "same-training": trial_steps.same_training,
    "effect": trial_steps.effect,
    "growth": trial_steps.growth,
}
"""The checks that run steps on an example. `graph-after-step` needs the model's very first step, so it is early."""


def doctor(
    model: nn.Module | None,
    example: dict[str, Any] | tuple[Any, ...] | None = None,
    *,
    mode: Mode | Plan | None = None,
    trainer_args: Source | None = None,
    accelerate: Source | None = None,
    deepspeed: Source | None = None,
    axolotl: Source | None = None,
    policy: Sequence[Any] = (),
    loss: Callable[[Any], Tensor] | None = None,
    blocks: str | Sequence[str] | None = None,
    versions: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Check a model and its training settings for known mistakes with recomputation.

    The model is not changed. Without an example nothing is run, so a model on the meta device is enough. With one, a
    few steps are run, and gradients, buffers and the random generator are restored afterwards.

    Args:
        model: the model, as it is before training; None checks only the settings.
        example: a batch, as a dict for `model(**example)` or a tuple for `model(*example)`.
        mode: the mode to be applied; with an example it is compared with plain training.
        trainer_args: `TrainingArguments`, a dict, or the path to a JSON or YAML file, also of accelerate or DeepSpeed.
        accelerate: accelerate's configuration, in the same forms.
        deepspeed: DeepSpeed's configuration, in the same forms.
        axolotl: axolotl's configuration, in the same forms.
        policy: the operators that your own selective checkpointing policy saves.
        loss: a function of the output; by default `output.loss`, or the output itself if it is a scalar.
        blocks: where the blocks are, as for `apply`.
        versions: versions on the training machine, if it is not this one, such as `{"torch": "2.12.0"}`.

    Raises:
        ModeError: the settings cannot be read.

    >>> import actmem
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)])
    >>> found = actmem.doctor(model, trainer_args={"gradient_checkpointing": True})
    >>> found.ok, found.findings[0].check, found.findings[0].found.partition(", with")[0]
    (False, 'batch-norm', 'batch norm in the blocks, at 0.1, 1.1, 2.1')
    """
    if model is not None and not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
        raise ModeError(
            f"the model is a {type(model).__name__}. Expected an nn.Module, or None to check only the settings."
        )
    if versions is not None and not isinstance(versions, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModeError(f"versions = {versions!r} is not a dict. Write versions={{'torch': '2.12.0'}}.")
    setup = read_setup(trainer_args, accelerate, deepspeed, axolotl)
    if isinstance(example, Mapping):
        example = dict(example)
    case = Case(model, setup, mode, tuple(policy), blocks, versions or {}, example, loss)
    findings: list[Finding] = []
    passed: list[str] = []
    skipped = [Skipped("settings", reason) for reason in setup.unread]
    for name, check in CHECKS.items() if example is None else (CHECKS | STEPS).items():
        found: list[Finding] = []
        try:
            found.extend(check(case))
        except NotMadeError as error:
            skipped.append(Skipped(name, str(error)))
        else:
            passed += [] if found else [name]
        findings += found
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Diagnosis(tuple(findings), tuple(passed), tuple(skipped))
