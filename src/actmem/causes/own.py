"""What actmem's own errors mean. Their messages already say what was found and what repairs it."""

from __future__ import annotations

from actmem.causes.cause import Cause

__all__ = ["OWN", "likely_of_replay"]

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
    "A function that was declared with actmem.replayable is in this chain, and did not give the same result for the "
    "same arguments: it keeps state, or reads something that it is not given.",
    "Give the function all that it reads as arguments, or take the declaration away: then its results are held.",
    "applied.check_replay() compares the replays of the next step again.",
)
SPLIT_SUMS = _of_replay(
    "nondeterministic-operator",
    "On an accelerator some operators add up in another order each time (atomic adds, split sums), unless asked not "
    "to.",
    "torch.use_deterministic_algorithms(True) and CUBLAS_WORKSPACE_CONFIG=:4096:8, or Rule('save', op='...') for the "
    "operator that is named.",
    "applied.check_replay() compares the replays of the next step again.",
)


def likely_of_replay(device: str, *, declared: bool) -> str:
    """Say what likely made a replay differ, from its device and whether it ran a function that was declared pure.

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
        "What was asked is not permitted, or matches nothing in this model.",
        "The message lists what is permitted, and the line to write.",
        "Nothing was changed: the model is as it was. docs/modes.md has every mode and option.",
    ),
    _of(
        "PlanError",
        "actmem-plan",
        "A plan cannot be read, is of a newer version, or was made for another model.",
        "Make the plan for this model: actmem.apply(model, mode).plan.save(path).",
        "Names, shapes and dtypes of the parameters, and the blocks, must be those that the plan was made for.",
    ),
    _of(
        "DeviceError",
        "actmem-device",
        "A device is not known, or a figure of it is missing.",
        "actmem.known_devices() lists the names; a file of your own can add one.",
        "Times and sizes come from that figure, so none is guessed.",
    ),
    _of(
        "StructureError",
        "actmem-structure",
        "The repeating blocks of the model were not found, or there are several candidates.",
        "Say where they are: actmem.apply(model, mode, blocks='model.layers.*'), or scope=['language'].",
        "The message lists the candidates.",
    ),
    _of(
        "ApplyError",
        "actmem-apply",
        "The model recomputes by other means already, is applied already, or has a forward that actmem cannot reach.",
        "Switch the other one off first: model.gradient_checkpointing_disable(), applied.remove(), or apply earlier.",
        "Two that recompute would do the work twice.",
    ),
    _of(
        "BudgetError",
        "actmem-budget",
        "No plan keeps the budget, or a batch is larger than the one that the plan was made for.",
        "A budget of at least the one in the message, a smaller batch, sharding, or offload='host'.",
        "actmem.frontier(profile, device) shows what each budget costs.",
    ),
    _of(
        "VersionError",
        "actmem-version",
        "A tensor that backward needs was changed in place after forward.",
        "Move the change behind backward, or make it out of place: y = x * 2 instead of x.mul_(2).",
        "Plain autograd raises in most such cases too; replaying would give wrong gradients.",
    ),
    _of(
        "FreedStorageError",
        "actmem-freed",
        "The memory of something that a replay needs is gone: resharded, or resized to nothing.",
        "Shard whole blocks: apply, then fully_shard(block) for each block.",
        "The message names the tensor.",
    ),
    _of(
        "SelfCheckError",
        "actmem-selfcheck",
        "A replayed value differs from the one that was dropped.",
        "Keep the results of the module that is named: Rule('save', module='...').",
        "The first step of every block is checked; applied.check_replay() checks the next one.",
    ),
    _of(
        "ReplayError",
        "actmem-replay",
        "A dropped value could not be brought back.",
        "Run the forward pass again; if the message calls it a defect, please report it.",
        "A backward pass that failed halfway cannot be taken up again.",
    ),
    _of(
        "OffloadError",
        "actmem-offload",
        "Bytes could not be moved: no room, an I/O error, or not the bytes that were written.",
        "Look at the room and the health of the directory in the message, or offload less: min_bytes=...",
        "What comes back from a disk is compared with a checksum, so wrong bytes are an error and no wrong gradient.",
    ),
    _of(
        "UnsupportedError",
        "actmem-unsupported",
        "A feature of torch is in use that does not go together with actmem.",
        "The message names it, and what to do instead.",
        "docs/design.md lists the limits.",
    ),
)
