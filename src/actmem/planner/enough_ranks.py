"""How many ranks are enough for a step that does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actmem.decisions import Decision
from actmem.devices import Device
from actmem.profiles import Profile
from actmem.profiling import sharded
from actmem.simulation import groups_of, outside_torch, simulate
from actmem.units import size

__all__ = ["enough_ranks"]

_HOST = 8
"""Beyond so many ranks, a number of them is a multiple of it: hosts have eight devices."""
_MOST = 2**16


def enough_ranks(
    p: Profile, keeps: Sequence[Sequence[Decision]], budget_bytes: int, known: Device, *, exact: bool
) -> Iterator[str]:
    """Say in a sentence over how many ranks FSDP2 has to shard for a step to fit, or that no number of them is enough.

    Args:
        p: the step.
        keeps: the decisions with the smallest peak.
        budget_bytes: what tensors may take.
        known: the device.
        exact: whether the decisions are followed to the letter.
    """
    if p.is_step:  # what its ranks hold is the user's own doing
        yield (
            "The step is your own: to see what it takes on more ranks, profile it there, "
            "actmem.profile_rank(build, world=N)."
        )
        return

    def peak(num_ranks: int) -> int:
        return simulate(sharded(p, num_ranks), keeps, exact=exact).peak_bytes

    def fits(num_ranks: int) -> bool:
        more = outside_torch(known, [num_ranks]) - outside_torch(known, groups_of(p))
        return peak(num_ranks) <= budget_bytes - (more if known.has_caching_allocator else 0)

    def told(num_ranks: int) -> str:
        here = f"sharding over {num_ranks} ranks, shard={num_ranks}: {size(peak(num_ranks))} on each"
        return f"What would help: {here}. Fewer {'' if num_ranks <= _HOST else 'hosts of 8 '}are not enough."

    few = next((n for n in range(2, _HOST + 1) if n > p.shard and fits(n)), None)
    if few is not None:
        yield told(few)
        return
    if not fits(_MOST):
        whole = p.parameters_bytes + p.gradients_bytes + p.optimizer_bytes
        yield (
            f"Sharding alone is not enough: over any number of ranks, each has {size(peak(_MOST))} of activations and "
            f"gathered parameters, and its part of {size(whole)} of parameters, gradients and optimizer state. "
            "Divide tensors, layers, experts or sequences too: actmem.ranks(model, batch, num_sequences=64, device=...)"
            " finds how many cards that takes, and in which layout."
        )
        return
    below, above = max(p.shard, _HOST) // _HOST, _MOST // _HOST
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if fits(middle * _HOST) else (middle, above)
    yield told(above * _HOST)
