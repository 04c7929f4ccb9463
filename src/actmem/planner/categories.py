"""What the bytes of a step are, as far as no plan can change it: parameters, optimizer state, gradients, the rest.

NOTE [ Categories ]
A profile's log has the bytes that the program itself keeps alive after each operator, not what they are. What they are
follows from when they come and go:

    parameters, buffers, optimizer   are alive when the step begins
    gradients      stay from their birth in backward until the end. So at each moment that no later one is below, all
                   that is alive stays, and what came since backward began is gradients. Between two such moments a
                   gradient is shown at the second, and as temporary until then; exact where backward begins and ends
    outside        what is there when backward begins and was not made by a gradient: logits, losses, embeddings; with
                   sharding also the gathered parameters. At any time at most the fewest bytes between then and there
    temporary      all else

What a plan holds, replays and fetches comes on top: `walking.py`. The sum is always exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from actmem.profiles import Profile

__all__ = ["CONSTANT", "NAMES", "VARYING", "Program", "program"]

CONSTANT = ("parameters", "buffers", "optimizer")
"""Categories that are the same all through the step."""
VARYING = ("gradients", "outside", "saved", "replayed", "transfers", "temporary")
"""Categories that come and go, in the order in which they are stacked."""

NAMES = {
    "parameters": "parameters",
    "buffers": "buffers",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "outside": "activations outside the blocks",
    "saved": "saved activations",
    "replayed": "replayed activations",
    "transfers": "on the way to or from elsewhere",
    "temporary": "temporaries",
}
"""What the categories are called in a text."""

_WITHOUT_LIVE = ("die", "pack", "drop")


@dataclass(frozen=True)
class Program:
    """What the program itself keeps alive, at each position of the log."""

    constant_bytes: dict[str, int]
    """Those of `CONSTANT`."""
    fixed_bytes: int
    """Their sum."""
    gradients: list[int]
    outside: list[int]
    live: list[int]
    """All of them, with the temporary ones."""
    backward: int
    """The position at which backward begins."""
    end: int
    """The position at which backward has ended."""

    def temporary(self, at: int, live_bytes: int) -> int:
        """Return what is left of the bytes that are alive at a position."""
        return live_bytes - self.fixed_bytes - self.gradients[at] - self.outside[at]


def program(profile: Profile) -> Program:
    """Divide what a profile's log keeps alive. See NOTE [ Categories ].

    >>> program(Profile(parameters_bytes=8, base_bytes=8, log=(("op", 0, 10), ("phase", "backward", 10)))).outside
    [2, 2]
    """
    base, log = profile.base_bytes, profile.log
    live: list[int] = []
    now = base
    for entry in log:
        now = now if entry[0] in _WITHOUT_LIVE else int(entry[-1])
        live.append(now)
    phases = {entry[1]: at for at, entry in enumerate(log) if entry[0] == "phase"}
    backward = phases.get("backward", len(log))
    end = phases.get("end", len(log))
    accumulates = profile.microbatches > 1
    all_gradients = profile.gradients_bytes // profile.shard
    constant = {"buffers": profile.buffers_bytes, "optimizer": profile.optimizer_bytes // profile.shard}
    constant["parameters"] = base - sum(constant.values()) - (all_gradients if accumulates else 0)
    fixed = sum(constant.values())
    if accumulates:
        gradients = [all_gradients] * len(log)
    else:
        gradients = _gradients(live, base, all_gradients, backward, end)
    return Program(
        constant_bytes={name: constant[name] for name in CONSTANT},
        fixed_bytes=fixed,
        gradients=gradients,
        outside=_outside(live, fixed, gradients, backward),
        live=live,
        backward=backward,
        end=end,
    )


def _gradients(live: list[int], base: int, all_bytes: int, backward: int, end: int) -> list[int]:
    found = [0] * len(live)
    if backward >= len(live):
        return found
    last = min(end, len(live) - 1)
    rest = max(0, live[last] - base - all_bytes)  # alive at the end, and no gradient
    fewest = live[last]
    lows: set[int] = set()
    for at in range(last, backward, -1):
        if live[at] <= fewest:
            fewest = live[at]
            lows.add(at)
    now = 0
    for at in range(backward, len(live)):
        if at in lows:
            now = max(0, min(all_bytes, live[at] - base - rest))
        found[at] = min(now, live[at] - base)
    return found


def _outside(live: list[int], fixed: int, gradients: list[int], backward: int) -> list[int]:
    free = [now - fixed - taken for now, taken in zip(live, gradients, strict=True)]
    found = free.copy()
    for at in range(min(backward, len(live) - 1) - 1, -1, -1):
        found[at] = min(found[at + 1], free[at])
    for at in range(backward + 1, len(live)):
        found[at] = min(found[at - 1], free[at])
    return found
