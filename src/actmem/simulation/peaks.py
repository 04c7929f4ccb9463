"""The peak of a step in words: where it is, what it consists of, and what would lower it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from actmem.decisions import Decision
from actmem.log_entries import Left, PhaseBegan, Unpacked
from actmem.modes import Full
from actmem.plan import Plan
from actmem.profiles import Layer, Profile, Value, with_collectives
from actmem.profiling import STEP, sharded
from actmem.simulation.plan_effect import decisions, follow
from actmem.simulation.simulator import Simulated, simulate
from actmem.simulation.step_walk import NAMES, Ground, Moments, Program, program, walk
from actmem.units import size

__all__ = ["lowering", "peak_words"]

_NUM_LARGEST = 3
_PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "replay": "in the backward pass, while values are recomputed",
    "optimizer": "when the optimizer steps",
}


def peak_words(
    profile: Profile,
    plan: Plan,
    walked: tuple[Moments, Simulated] | None = None,
    *,
    accelerator: bool = True,
    used: Sequence[str] = (),
) -> tuple[str, ...]:
    """Describe where the peak of a step under a plan is, what it consists of, and what would lower it: a sentence each.

    Args:
        profile: what the step does.
        plan: a plan for the same model.
        walked: what `walk` returned for the two, if it was called.
        accelerator: whether the step runs on one, so that host memory is separate.
        used: the measures that the plan uses, or was allowed to use.

    >>> from actmem.decision_rules import Rule
    >>> peak_words(Profile(), Plan([Rule("save")], [], "", "SaveEverything()"))
    ()
    """
    profile = with_collectives(profile, again=plan.collectives == "recompute")
    moments, simulated = walk(Ground(profile), plan) if walked is None else walked
    if moments.peak < 0:
        return ()
    at = moments.peak
    found = moments.constant_bytes | {c: series[at] for c, series in moments.by_category.items()}
    parts = sorted(((num_bytes, NAMES[c]) for c, num_bytes in found.items() if num_bytes), reverse=True)
    said = [
        f"The peak of {size(simulated.peak_bytes)} is reached {_where(profile, moments)}.",
        f"It consists of {', '.join(f'{name} {size(num_bytes)}' for num_bytes, name in parts)}.",
    ]
    if found["saved"] and (held := _largest_held(profile, moments, simulated)):
        said.append(f"Most of the saved activations: {', '.join(held)}.")
    rest = _without_loss(profile, simulated.timeline)
    if _is_less(rest, simulated.peak_bytes):
        allow = "" if plan.split is not None or "split" in used else ": allow split"
        spike = size(simulated.peak_bytes - rest)
        said.append(f"It is one spike of the loss, {spike} above the rest of the step{allow}.")
    offloaded = plan.offload is not None
    keeps = decisions(profile, plan)
    helps = lowering(profile, keeps, simulated, exact=plan.exact, offloaded=offloaded, accelerator=accelerator)
    full = replace(plan, rules=Full().rules(), mode="Full()", offload=None, exact=False, predicted=None)
    everything = follow(profile, full).peak_bytes
    if _is_less(everything, simulated.peak_bytes):
        helps.insert(0, f"recomputing every block: {size(everything)}.")
    if helps:
        said.append(f"What would lower it: {'; '.join(text.rstrip('.') for text in helps)}.")
    else:
        said.append("Neither another batch, loss or plan nor sharding would lower it.")
    return tuple(said)


def _where(profile: Profile, moments: Moments) -> str:
    at = moments.peak
    layer, cost = moments.layers[at], profile.costs[moments.costs[at]]
    when = _PHASES[moments.phases[at]]
    if cost.op == STEP:
        return when
    path = ".".join(part for part in (profile.layers[layer].path if layer >= 0 else "", moments.modules[at]) if part)
    place = f"in {path}" if path else "in the model itself" if layer >= 0 else "outside the blocks"
    moved = f", an operator that reads and writes {size(cost.moved_bytes)}" if cost.moved_bytes else ""
    op = cost.op.removeprefix("aten.").removesuffix(".default")
    return f"{when}, {place}, after {op}{moved}"


def _largest_held(profile: Profile, moments: Moments, simulated: Simulated) -> list[str]:
    """Name the largest values of the blocks that are held at the peak: of blocks that backward has not reached."""
    at = moments.peak
    seen = moments.layers[: at + 1]
    back = {layer for layer, phase in zip(seen, moments.phases, strict=False) if layer >= 0 and phase != "forward"}
    alive = {layer for layer in seen if layer >= 0} - back
    if moments.phases[at] == "forward":
        alive -= {moments.layers[at]}
    counted: Counter[tuple[int, str]] = Counter()
    known: set[int] = set()
    for i in alive:
        layer = profile.layers[i]
        for v in set(simulated.held[i]) - set(simulated.away[i]):
            value = layer.values[v]
            if value.kind == "state" or value.storage in known:
                continue
            known.add(value.storage)
            counted[value.num_bytes, _made_by(layer, value)] += 1
    largest = sorted(counted.items(), key=lambda item: -item[0][0] * item[1])[:_NUM_LARGEST]
    return [f"{num} x {size(num_bytes)} of {name}" for (num_bytes, name), num in largest if num_bytes]


def _made_by(layer: Layer, value: Value) -> str:
    if value.call < 0:
        return "the input of a block"
    call = layer.calls[value.call]
    op = call.op.removeprefix("aten.").removesuffix(".default")
    return f"{call.module} ({op})" if call.module else op


def lowering(
    p: Profile,
    keeps: Sequence[Sequence[Decision]],
    simulated: Simulated,
    *,
    exact: bool,
    offloaded: bool,
    accelerator: bool,
    shards: Sequence[int] = (2, 8),
    measures: bool = True,
) -> list[str]:
    """List what would lower the peak of a step, and to how much.

    Args:
        p: the step.
        keeps: the decisions.
        simulated: what it takes under them.
        exact: whether they are followed to the letter.
        offloaded: whether offloading is permitted already.
        accelerator: whether it is for a device with memory of its own.
        shards: numbers of ranks to try.
        measures: whether to name a loss in chunks and offloading.
    """
    found: list[str] = []
    peak = simulated.peak_bytes
    ground = program(p)
    highest = next((at for at, live in simulated.timeline if live == peak), 0)
    # What the optimizer takes depends on no batch and no decision.
    in_step = not (ground.in_optimizer[highest] if p.is_step else simulated.peak_op == STEP)
    static = p.base_bytes - p.starting_gradients_bytes + p.gradients_bytes // p.shard
    half = max(static, _halved(ground, simulated.timeline))
    if in_step and _is_less(half, peak):
        found.append(
            f"half the batch or half the sequence: about {size(half)}, as parameters, optimizer state and gradients "
            f"take {size(static)} whatever the batch."
        )
    rest = _without_loss(p, simulated.timeline)
    if measures and in_step and _is_less(rest, peak):
        found.append(
            "logits and loss that are computed in chunks, or in more of them (split=actmem.Split(loss=16), or "
            "allow=['split'] for actmem.fit, if the head is a linear layer): "
            f"at best {size(rest)}, the peak of all else."
        )
    if measures and not offloaded and in_step:
        moved = [[Decision.OFFLOAD if k is Decision.SAVE else k for k in keep] for keep in keeps]
        away = simulate(p, moved, exact=exact)
        if _is_less(away.peak_bytes, peak):
            where = "offload='host' or 'disk'" if accelerator else "offload='disk'"
            found.append(f"{where}: {size(away.peak_bytes)}.")
    for num_ranks in shards:
        if p.shard == 1 and not p.is_step:
            one = simulate(sharded(p, num_ranks), keeps, exact=exact).peak_bytes
            if _is_less(one, peak):
                found.append(f"sharding over {num_ranks} ranks, shard={num_ranks}: {size(one)} on each.")
    if p.optimizer_bytes and p.shard == 1:
        found.append(f"an optimizer without state: {size(peak - p.optimizer_bytes)}.")
    return found


def _is_less(num_bytes: int, than_bytes: int) -> bool:
    """Return whether it is less, and is written differently."""
    return num_bytes < than_bytes and size(num_bytes) != size(than_bytes)


def _halved(ground: Program, timeline: tuple[tuple[int, int], ...]) -> int:
    """Return the peak with half of everything but parameters, optimizer state, gradients and the optimizer's step."""
    kept = [ground.fixed_bytes + gradients for gradients in ground.gradients]
    return max(
        (live if ground.in_optimizer[at] else kept[at] + (live - kept[at]) // 2 for at, live in timeline),
        default=0,
    )


def _without_loss(p: Profile, timeline: tuple[tuple[int, int], ...]) -> int:
    """Return the peak outside the loss: all that runs from the last block's forward to the first one's backward."""
    in_loss: set[int] = set()
    left, backward = -1, -1
    for at, entry in enumerate(p.log):
        if isinstance(entry, Left):
            left = at
        elif isinstance(entry, PhaseBegan) and entry.name == "backward":
            backward = at
        elif isinstance(entry, Unpacked) and backward >= 0:
            in_loss.update(range(left + 1 if left >= 0 else backward, at))
            backward = -1
    return max((live for at, live in timeline if at not in in_loss), default=0)
