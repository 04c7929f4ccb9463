"""Known defects of other libraries: affected versions, and the settings under which they matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from torch import nn

from actmem.compilercompat import compiler_budget
from actmem.diagnosis.findings import Finding, Severity
from actmem.diagnosis.regions import Case

__all__ = ["BUGS", "Bug", "is_before", "known_bugs", "version_of"]


@dataclass(frozen=True)
class Bug:
    """A defect, the versions affected, and the settings under which it matters."""

    package: str
    fixed: str | None
    """The first version that fixes it; None if none is known."""
    severity: Severity
    matters: Callable[[Case], str | None]
    """Returns a description of what was found, or None if the defect does not matter in this case."""
    why: str
    change: str
    actmem: str


def _sharded_inputs(case: Case) -> str | None:
    return f"FSDP ({case.setup.fsdp}) with {case.checkpointing}" if case.setup.fsdp and case.checkpointing else None


def _rrelu(case: Case) -> str | None:
    if case.checkpointing is None or case.reentrant is not None:
        return None
    return next((f"RReLU at {p} with {case.checkpointing}" for p, m in case.modules if isinstance(m, nn.RReLU)), None)


def _compiler_budget(case: Case) -> str | None:
    if (fraction := compiler_budget()) >= 1:
        return None
    drawn = next((p for p, m in case.modules if isinstance(m, nn.Dropout | nn.RReLU) and _draws(m)), None)
    return None if drawn is None else f"activation_memory_budget = {fraction:g} in torch, and random numbers at {drawn}"


def _draws(module: nn.Module) -> bool:
    return bool(getattr(module, "p", 1.0))


BUGS: tuple[Bug, ...] = (
    Bug(
        "torch",
        "2.13",
        "problem",
        _sharded_inputs,
        "In this version of torch, FSDP2 does not cast the inputs again during recomputation: “have different "
        "metadata”, bfloat16 against float32 (https://github.com/pytorch/pytorch/issues/159359).",
        "Use torch 2.13 or newer, or wrap for checkpointing before fully_shard.",
        "actmem requires torch 2.13, and replays the casts that ran.",
    ),
    Bug(
        "torch",
        None,
        "problem",
        _rrelu,
        "RReLU gives wrong gradients under non-reentrant checkpointing, without an error "
        "(https://github.com/pytorch/pytorch/issues/193671, open).",
        "Use LeakyReLU there, or do not checkpoint that block.",
        "Replayed with the same random numbers: gradients are exact.",
    ),
    Bug(
        "torch",
        None,
        "problem",
        _compiler_budget,
        "Below 1.0, torch.compile's budget may draw new dropout masks in backward: wrong gradients, without an error "
        "(https://github.com/pytorch/pytorch/issues/190758, open).",
        "Leave torch._functorch.config.activation_memory_budget at 1.0.",
        "actmem.Budget('20GiB') is a budget in bytes and preserves every mask.",
    ),
)


def known_bugs(case: Case) -> Iterator[Finding]:
    """Look for defects in the installed versions that matter for this model and these settings."""
    for bug in BUGS:
        installed = version_of(case, bug.package)
        if installed is None or (bug.fixed is not None and not is_before(installed, bug.fixed)):
            continue
        if (found := bug.matters(case)) is not None:
            yield Finding(
                check="known-bugs",
                severity=bug.severity,
                found=f"{found}, and {bug.package} {installed}",
                why=bug.why,
                change=bug.change,
                actmem=bug.actmem,
            )


def version_of(case: Case, package: str) -> str | None:
    """Return the version of a package, as given or else as installed; None if it is not installed."""
    if package in case.versions:
        return case.versions[package]
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def is_before(left: str, right: str) -> bool:
    """Whether one version is older than another.

    >>> is_before("2.12.1", "2.13"), is_before("2.13.0+cpu", "2.13"), is_before("0.19.2", "0.19.2")
    (True, False, False)
    """
    return _numbers(left) < _numbers(right)


def _numbers(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in text.split("+", maxsplit=1)[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
