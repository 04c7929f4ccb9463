"""The form of a known cause of an error, and the causes of actmem's own errors, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["OWN", "Cause", "github", "likely_of_replay"]

Pairs = Literal["empty", "doubled", "rows", "precision", "shifted", "kind"]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One cause of an error message, and its fix."""

    name: str
    """A short, unique name."""
    message: str
    """Regular expression for the message, in a text with whitespace collapsed to single blanks."""
    what: str
    """What happened."""
    fix: str
    """What to change if torch, or another library, recomputes."""
    actmem: str
    """What actmem does about it: the line to write, or that it makes no difference."""
    pairs: Pairs | None = None
    """How the saved and recomputed tensors listed in the message must differ; see `explanation.py`."""
    hints: tuple[str, ...] = ()
    """Regular expressions that make this cause more likely: names in the traceback, other lines of the log."""
    needs_hint: bool = False
    """Whether at least one hint must be present."""
    general: bool = False
    """Whether to report it only if nothing more specific fits the same message."""
    warning: bool = False
    """Whether the message does not stop a program; an error in the same text is then reported first."""
    reports: tuple[str, ...] = ()
    """Public threads in which it was seen."""


def github(*threads: str) -> tuple[str, ...]:
    """Expand `owner/name#number` to URLs.

    >>> github("pytorch/pytorch#82156")
    ('https://github.com/pytorch/pytorch/issues/82156',)
    """
    return tuple(f"https://github.com/{thread.replace('#', '/issues/')}" for thread in threads)


_LIKELY = "Likely cause: "
_SELF_CHECK = r"actmem\.errors\.SelfCheckError\b"


def _of(error: str, name: str, what: str, fix: str, actmem: str) -> Cause:
    return Cause(name=name, message=rf"actmem\.errors\.{error}\b", what=what, fix=fix, actmem=actmem, general=True)


def _of_replay(name: str, what: str, fix: str, actmem: str) -> Cause:
    named = rf"{_LIKELY}{name}\."
    return Cause(name=name, message=_SELF_CHECK, hints=(named,), needs_hint=True, what=what, fix=fix, actmem=actmem)


UNSEEN_KERNEL = _of_replay(
    "unseen-kernel",
    "A kernel that torch cannot see (Triton, numpy, a C++ extension), or a write through x.data, changed a tensor of "
    "this chain; or an operator in it is not deterministic.",
    "Declare the function that launches the kernel with actmem.replayable(fn), or keep that module's results: "
    "Rule('save', module='...').",
    "applied.check_replay() compares the replays of the next step again.",
)
NOT_PURE = _of_replay(
    "replayable-not-pure",
    "A function declared with actmem.replayable is in this chain, and did not return the same result for the same "
    "arguments: it keeps state, or reads something that is not an argument.",
    "Pass everything that the function reads as arguments, or remove the declaration: then its results are held.",
    "applied.check_replay() compares the replays of the next step again.",
)
SPLIT_SUMS = _of_replay(
    "nondeterministic-operator",
    "On an accelerator some operators add in a different order each time (atomic adds, split sums), unless told not "
    "to.",
    "torch.use_deterministic_algorithms(True) and CUBLAS_WORKSPACE_CONFIG=:4096:8, or Rule('save', op='...') for the "
    "operator in the message.",
    "applied.check_replay() compares the replays of the next step again.",
)


def likely_of_replay(device: str, *, declared: bool) -> str:
    """Describe the likely cause of a replay that differs, given its device and whether it ran a declared function.

    >>> likely_of_replay("cpu", declared=True)[:35]
    'Likely cause: replayable-not-pure. '
    """
    likely = [NOT_PURE if declared else UNSEEN_KERNEL]
    likely += [SPLIT_SUMS] if device != "cpu" else []
    return " ".join(f"{_LIKELY}{cause.name}. {cause.what} {cause.fix}" for cause in likely)


OWN: tuple[Cause, ...] = (
    NOT_PURE,
    UNSEEN_KERNEL,
    SPLIT_SUMS,
    _of(
        "ModeError",
        "actmem-mode",
        "The request is not permitted, or matches nothing in this model.",
        "The message lists what is permitted, and the line to write.",
        "The model was not changed. docs/modes.md describes every mode and option.",
    ),
    _of(
        "PlanError",
        "actmem-plan",
        "A plan cannot be read, has a newer version, or was made for another model.",
        "Make the plan for this model: actmem.apply(model, mode).plan.save(path).",
        "Names, shapes and dtypes of the parameters, and the blocks, must be those that the plan was made for.",
    ),
    _of(
        "DeviceError",
        "actmem-device",
        "A device is not known, or one of its figures is missing.",
        "actmem.known_devices() lists the names; you can add one in your own file.",
        "Times and sizes depend on that figure, so it is never guessed.",
    ),
    _of(
        "StructureError",
        "actmem-structure",
        "The model's repeating blocks were not found, or there are several candidates.",
        "Say where they are: actmem.apply(model, mode, blocks='model.layers.*'), or scope=['language'].",
        "The message lists the candidates.",
    ),
    _of(
        "ApplyError",
        "actmem-apply",
        "The model already uses other recomputation, is already applied, or has a forward that actmem cannot reach.",
        "Switch the other one off first: model.gradient_checkpointing_disable(), applied.remove(), or apply earlier.",
        "With both, the work would be done twice.",
    ),
    _of(
        "BudgetError",
        "actmem-budget",
        "No plan fits the budget, or a batch is larger than the one that the plan was made for.",
        "A budget of at least the one in the message, a smaller batch, sharding, or offload='host'.",
        "actmem.frontier(profile, device) shows what each budget costs.",
    ),
    _of(
        "VersionError",
        "actmem-version",
        "A tensor that backward needs was changed in place after forward.",
        "Move the change after backward, or make it out of place: y = x * 2 instead of x.mul_(2).",
        "Plain autograd raises in most such cases too; replaying would give wrong gradients.",
    ),
    _of(
        "FreedStorageError",
        "actmem-freed",
        "The memory of a tensor that a replay needs has been freed: resharded, or resized to zero.",
        "Shard whole blocks: apply, then fully_shard(block) for each block.",
        "The message names the tensor.",
    ),
    _of(
        "SelfCheckError",
        "actmem-selfcheck",
        "A replayed value differs from the one that was dropped.",
        "Save the results of the module in the message: Rule('save', module='...').",
        "The first step of every block is checked; applied.check_replay() checks the next one.",
    ),
    _of(
        "ReplayError",
        "actmem-replay",
        "A dropped value could not be recomputed.",
        "Run the forward pass again; if the message calls it a defect, please report it.",
        "A backward pass that failed halfway cannot be resumed.",
    ),
    _of(
        "OffloadError",
        "actmem-offload",
        "Bytes could not be moved: no space, an I/O error, or corrupted data.",
        "Check the free space and the health of the directory in the message, or offload less: min_bytes=...",
        "Data read back from a disk is checked against a checksum: wrong bytes raise an error, never a wrong gradient.",
    ),
    _of(
        "SnapshotError",
        "actmem-snapshot",
        "A file is not a recording of CUDA memory that can be read.",
        "Write it with torch.cuda.memory._dump_snapshot(path), or with actmem record.",
        "Snapshots are read without running anything in them: a file that names code is refused.",
    ),
    _of(
        "UnsupportedError",
        "actmem-unsupported",
        "A feature of torch is in use that is not compatible with actmem.",
        "The message names it, and what to do instead.",
        "docs/design.md lists the limits.",
    ),
)
