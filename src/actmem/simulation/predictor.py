"""What a plan or a mode will take, from a profile alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from actmem.allocator import AllocatorSettings
from actmem.devices import Device
from actmem.errors import ModeError, PlanError
from actmem.modes import FromPlan, Mode
from actmem.plan import Plan
from actmem.profiles import Profile
from actmem.simulation.card_kernels import on_card, unknowns
from actmem.simulation.card_usage import card_memory, estimates
from actmem.simulation.peaks import peak_words
from actmem.simulation.plan_effect import follow
from actmem.simulation.simulator import Simulated
from actmem.simulation.step_cost import cost_seconds, dtypes_of, resolved, step_seconds
from actmem.simulation.stepped_profile import with_stepping

__all__ = ["Prediction", "plan_of", "predict"]


@dataclass(frozen=True)
class Prediction:
    """The outcome of `predict`."""

    peak_bytes: int
    """The most bytes that are alive at any moment of a step, as `Measurement.peak_bytes` counts them: with the states
    of generators that replays need, and, if the profile is of a real step on a CPU, with the workspaces of kernels. On
    a card: what torch counts as allocated (`max_memory_allocated`), with rounding, tails and workspaces."""
    tensor_bytes: int
    """The same without these two, as `Measurement.tensor_bytes` counts."""
    peak_op: str
    """The operator at which the peak occurs."""
    peak_block: str
    """The block in which it runs; "" if it runs outside the blocks."""
    saved_bytes: int
    """What is alive when backward begins, beyond what is alive between steps."""
    replayed_flops: int
    num_replayed: int
    """How many operators are run again."""
    replay_seconds: float
    step_seconds: float
    """Forward and backward with everything saved."""
    sent_bytes: int
    """Bytes that are offloaded, and come back."""
    timeline: tuple[int, ...]
    """Bytes alive after each operator, in chronological order."""
    reserved_bytes: int | None = None
    """What torch takes from a card's driver (`max_memory_reserved`): the simulated caching allocator, over several
    steps. None on a device that it does not serve."""
    outside_bytes: int = 0
    """What of the card lies outside torch: kept by the driver, context, kernels."""
    live_bytes: int = 0
    """The bytes of the tensors that are alive at the peak, on every device."""
    assumptions: tuple[str, ...] = ()
    """What is not known of the card's kernels."""
    step: tuple[Profile, Plan] | None = field(default=None, repr=False, compare=False)
    """What was predicted, from which the text is made."""

    @property
    def peak_words(self) -> tuple[str, ...]:
        """Where the peak is, what it consists of, and what would lower it: a sentence each."""
        return () if self.step is None else peak_words(*self.step)

    def __str__(self) -> str:
        ratio = f"step {self.step_time_ratio:.3f}x of saving everything, {self.num_replayed} operators run again"
        return "\n".join([*self.peak_words, ratio])

    @property
    def step_time_ratio(self) -> float:
        """Seconds of forward and backward, over those with everything saved. Waiting for copies is not counted."""
        return 1.0 if not self.step_seconds else (self.step_seconds + self.replay_seconds) / self.step_seconds


def predict(
    profile: Profile,
    plan: Plan | Mode,
    device: Device | str | None = None,
    *,
    allocator: str | AllocatorSettings | None = None,
    collectives: Literal["save", "recompute"] | None = None,
) -> Prediction:
    """Predict the peak, and the cost, of a step under a plan or a mode. Bytes are exact for what the profile saw.

    Args:
        profile: what the step does, as `profile` found it.
        plan: a plan for the same model, or a mode.
        device: whose speed and kernels to take: a name such as "h100-80gb", or a `Device`. Default: this machine.
        allocator: on a card, what PYTORCH_CUDA_ALLOC_CONF will be, such as "expandable_segments:True". Default: what
            the plan was made for, and for a mode torch's defaults.
        collectives: as for `apply`. Default: what the plan says; "save" for a mode.

    >>> import torch, actmem
    >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
    >>> found = actmem.profile(model, (torch.randn(2, 8),), loss=torch.sum, optimizer=None)
    >>> actmem.predict(found, actmem.Full(), "h100-80gb").replayed_flops
    768
    >>> actmem.predict(found, actmem.Full(), "h100-80gb").reserved_bytes // 2**20  # cuBLAS has two workspaces
    66
    """
    plan = plan_of(profile, plan)
    if allocator is None:
        allocator = "" if plan.predicted is None else plan.predicted.allocator
    settings = AllocatorSettings.of(allocator)
    if collectives is not None:
        plan = replace(plan, collectives=collectives)
    known = resolved(device, dtypes_of(profile))
    profile = on_card(with_stepping(profile, plan), known)
    seconds = cost_seconds(profile, known)
    if not known.has_caching_allocator:
        return replace(prediction(profile, follow(profile, plan, timeline=True), seconds), step=(profile, plan))
    memory, simulated = card_memory(profile, plan, known, settings=settings)
    return replace(
        prediction(profile, simulated, seconds),
        peak_bytes=memory.allocated_bytes,
        reserved_bytes=memory.reserved_bytes,
        outside_bytes=memory.outside_bytes,
        assumptions=(*unknowns(profile), *estimates(profile)),
        step=(profile, plan),
    )


def prediction(profile: Profile, simulated: Simulated, seconds: list[float]) -> Prediction:
    """Sum up a simulated step."""
    replayed = [profile.layers[layer].calls[c].cost for layer, calls in enumerate(simulated.replayed) for c in calls]
    layer = simulated.peak_layer
    return Prediction(
        peak_bytes=simulated.peak_bytes,
        tensor_bytes=simulated.tensor_bytes,
        peak_op=simulated.peak_op,
        peak_block=profile.layers[layer].path if layer >= 0 else "",
        saved_bytes=simulated.saved_bytes,
        replayed_flops=sum(profile.costs[c].flops for c in replayed),
        num_replayed=len(replayed),
        replay_seconds=sum(seconds[c] for c in replayed),
        step_seconds=step_seconds(profile, seconds),
        sent_bytes=simulated.sent_bytes,
        timeline=tuple(live for _, live in simulated.timeline),
        live_bytes=simulated.peak_bytes,
    )


def plan_of(profile: Profile, mode: Plan | Mode) -> Plan:
    """Resolve a mode for the model of a profile."""
    if isinstance(mode, FromPlan):
        mode = Plan.load(mode.path)
    if isinstance(mode, Plan):
        if mode.blocks != profile.blocks:
            raise PlanError(
                f"the plan is for the blocks {' '.join(mode.blocks[:3])} ..., the profile for "
                f"{' '.join(profile.blocks[:3])} ...: they are not of one model. Make the profile of the plan's model."
            )
        return mode
    if not hasattr(mode, "rules"):
        raise ModeError(
            f"{mode!r} is neither a plan nor a mode, and what it does cannot be predicted. Pass a mode such as "
            "actmem.Full(), or a plan."
        )
    return Plan(mode.rules(), profile.blocks, profile.fingerprint, repr(mode), getattr(mode, "offload", None))
