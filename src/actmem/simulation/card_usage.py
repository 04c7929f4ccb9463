"""What a plan takes of a card: the allocations of several steps, run through the caching allocator.

A step is simulated once, and its allocations are repeated: the first step starts from an empty allocator and creates
the optimizer's state, those after it find the memory that the step before has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from actmem.allocator import Alloc, AllocatorSettings, Event, Free, SimulatedMemory, find_steps, step_curve
from actmem.allocator import simulate as run_allocator
from actmem.devices import Device
from actmem.log_entries import CallRan, Entry, OpRan, PhaseBegan
from actmem.plan import Plan
from actmem.profiles import Profile
from actmem.simulation.plan_effect import follow
from actmem.simulation.simulator import Simulated

__all__ = [
    "NUM_STEPS",
    "CardMemory",
    "card_memory",
    "estimates",
    "groups_of",
    "outside_torch",
    "step_changes",
    "training_events",
]

NUM_STEPS = 3
"""How many steps are simulated: one from an empty allocator, and two more."""

_TWO_RANKS_BYTES, _MORE_RANKS_BYTES = 544_000_000, 688_000_000
"""What NCCL takes for one communicator: NVIDIA/nccl#964, on A100."""
_COUNTER_BYTES = 8
"""An optimizer's counters are numbers, which stay on the host."""
_FORWARD, _BACKWARD, _OPTIMIZER = "workspace of forward", "workspace of backward", "optimizer"
_PASS = "a backward pass begins"


@dataclass(frozen=True)
class CardMemory:
    """What a plan takes of a card."""

    allocated_bytes: int
    """The most that torch counts as allocated in the last of the simulated steps, tails and workspaces included."""
    reserved_bytes: int
    """The most that torch takes from the driver in any of them."""
    outside_bytes: int
    """What the driver and the process take besides."""
    whole: SimulatedMemory
    requests: tuple[int, ...] = field(default=(), repr=False)
    """The bytes that each of the simulated events requests; 0 where memory is freed."""

    @property
    def curve(self) -> tuple[int, ...]:
        """Allocated bytes over a step, as `step_curve` draws them."""
        made = [(size, told[0]) for size, told in zip(self.requests, self.whole.curve, strict=True) if size]
        sizes, allocated = [size for size, _ in made], [after for _, after in made]
        steps = find_steps(sizes, allocated)
        last = slice(0, 0) if not steps else slice(steps[-1].start, steps[-1].stop)
        return step_curve(sizes[last], allocated[last])

    @property
    def needed_bytes(self) -> int:
        """What the card must have."""
        return self.reserved_bytes + self.outside_bytes


def outside_torch(device: Device, groups: Sequence[int] = ()) -> int:
    """Return what of a card lies outside torch: driver, context and a communicator of NCCL for each group of ranks.

    >>> from actmem.devices import device
    >>> outside_torch(device("h100-80gb"), [8, 2, 1]) - outside_torch(device("h100-80gb"))
    1232000000
    """
    each = [_TWO_RANKS_BYTES if num_ranks == 2 else _MORE_RANKS_BYTES for num_ranks in groups if num_ranks > 1]
    return device.outside_bytes + sum(each)


def groups_of(profile: Profile) -> tuple[int, ...]:
    """Return how many ranks each of the groups has in which a profiled rank communicates.

    >>> groups_of(Profile(shard=8)), groups_of(Profile())
    ((8,), ())
    """
    if profile.place is not None:
        return profile.place.groups
    return (profile.shard,) if profile.shard > 1 else ()


@dataclass(frozen=True)
class _Mark:
    """Something that happens between allocations."""

    name: str


class _Changes:
    """Collects what a step allocates and frees, in order."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._alive: set[int] = {number for number, _, _ in profile.stock}
        self._name = max(profile.storages, default=-1) + 1 + len(profile.stock)
        self._in_backward = False
        self._marked: set[str] = set()
        self.found: list[tuple[int, int] | _Mark] = []
        """A name and its bytes; none where it is freed."""

    def allocated(self, storage: int, num_bytes: int) -> None:
        self.freed(
            storage
        )  # one that is filled again was emptied, whoever holds it: FSDP does that with its parameters
        self._alive.add(storage)
        self.found.append((storage, num_bytes))

    def freed(self, storage: int) -> None:
        if storage in self._alive:
            self._alive.discard(storage)
            self.found.append((storage, 0))

    def taken(self, num_bytes: int) -> int:
        self._name += 1
        if num_bytes:
            self.allocated(self._name, num_bytes)
        return self._name

    def given_back(self, name: int) -> None:
        self.freed(name)

    def passed(self, entry: Entry) -> None:
        if isinstance(entry, PhaseBegan):
            self._in_backward = entry.name == "backward"
            if self._in_backward:
                self.found.append(_Mark(_PASS))
            if entry.name == ("optimizer" if self._profile.is_step else "end"):
                self._mark(_OPTIMIZER)
        elif isinstance(entry, (OpRan, CallRan)):
            self._multiplied(entry.cost)

    def replayed(self, cost: int) -> None:
        self._multiplied(cost)

    def _multiplied(self, cost: int) -> None:
        if self._profile.costs[cost].flops:
            self._mark(_BACKWARD if self._in_backward else _FORWARD)

    def _mark(self, name: str) -> None:
        if name not in self._marked:
            self._marked.add(name)
            self.found.append(_Mark(name))


def step_changes(profile: Profile, plan: Plan) -> tuple[list[tuple[int, int] | _Mark], Simulated]:
    """Return what one step under a plan allocates and frees, and the step itself."""
    made: list[_Changes] = []

    def new() -> _Changes:
        made.append(_Changes(profile))
        return made[-1]

    simulated = follow(profile, plan, timeline=True, watcher=new)
    return made[-1].found, simulated


def training_events(
    profile: Profile, changes: list[tuple[int, int] | _Mark], workspace_bytes: int, num_steps: int = NUM_STEPS
) -> Iterator[tuple[bool, Event]]:
    """Yield the allocations of several steps, from an empty allocator on; and whether the last step begins there."""
    begins = False
    ranks = profile.shard
    state = [(n, size) for n, size, role in profile.stock if role == "optimizer_state" and size > _COUNTER_BYTES]
    state += [(-1 - nth, size) for nth, size in enumerate(profile.optimizer_stock)]
    there = {number for number, _, role in profile.stock if role not in ("optimizer_state", "gradients")}
    for number, size, role in profile.stock:
        if number in there:
            yield False, Alloc(number, _part(size, ranks) if role == "parameters" else size)
    lasting = _lasting(changes) if ranks > 1 else frozenset[int]()
    before = _replaced(changes)
    holder: dict[int, int | str] = {number: number for number in there}
    """Who has the memory of what was there when the step began."""
    done: set[str] = set()
    left: dict[int, str] = {}
    """What a step left behind in variables of its own: each is freed when the next step first fills the variable."""
    for step in range(num_steps):
        born: dict[int, str] = {}
        begins = step == num_steps - 1
        for change in changes:
            if isinstance(change, _Mark):
                if change.name == _PASS:
                    continue
                if change.name not in done:
                    done.add(change.name)
                    if change.name != _OPTIMIZER:
                        yield begins, Alloc(change.name, workspace_bytes)
                    else:
                        holder |= {number: number for number, _ in state}
                        for number, size in state:
                            yield begins, Alloc(number, _part(size, ranks))
                if change.name == _OPTIMIZER:
                    for number, size in profile.optimizer_memory:
                        name = f"{step}: step {number}"
                        yield begins, Alloc(name, _part(size, ranks)) if size else Free(name)
                continue
            number, size = change
            if size:
                born[number] = name = f"{step}: {number}"
                yield begins, Alloc(name, _part(size, ranks) if number in lasting else size)
                if number in left:
                    yield begins, Free(left.pop(number))
            elif number in born:
                yield begins, Free(born.pop(number))
            elif number in holder:
                yield begins, Free(holder.pop(number))
        if profile.is_step:
            after = {start: born.pop(end, None) or holder.get(end) for start, end in profile.carried}
            holder |= {start: name for start, name in after.items() if name is not None}
            left |= {_first(number, before): name for number, name in born.items()}
        elif profile.microbatches == 1:
            for name in born.values():  # optimizer.zero_grad()
                yield False, Free(name)


def _replaced(changes: list[tuple[int, int] | _Mark]) -> dict[int, int]:
    """Return which storage took the place of which in a variable of a loop inside the step.

    The one before has its size, is there since before the last backward pass, and is freed as soon as it exists.

    >>> _replaced([(1, 8), _Mark(_PASS), (2, 4), (2, 0), (3, 8), (1, 0)])
    {3: 1}
    """
    found: dict[int, int] = {}
    made: dict[int, tuple[int, int]] = {}
    """Storage -> its bytes, and how many backward passes had begun."""
    passes, last = 0, -1
    for change in changes:
        if isinstance(change, _Mark):
            passes += change.name == _PASS
            continue
        number, size = change
        if size:
            made[number], last = (size, passes), number
        elif number in made and last in made and made[number][0] == made[last][0] and made[number][1] < made[last][1]:
            found[last] = number
    return found


def _first(number: int, before: dict[int, int]) -> int:
    """Return the first storage of a step that was in the same variable: a loop inside the step fills it repeatedly."""
    while number in before:
        number = before[number]
    return number


def estimates(profile: Profile) -> tuple[str, ...]:
    """Name what is estimated of a card, where it is not simulated.

    >>> estimates(Profile())
    ()
    >>> "estimated" in estimates(Profile(shard=8))[0]
    True
    """
    if profile.shard == 1:
        return ()
    exact = f"fit(profile_rank(build, world={profile.shard}), ...) simulates the rank's own"
    return (f"what the allocator adds on a rank: it is estimated, from a part of each allocation ({exact})",)


def _lasting(changes: list[tuple[int, int] | _Mark]) -> frozenset[int]:
    """Return what a step allocates and leaves behind: gradients.

    >>> sorted(_lasting([(1, 8), (2, 8), (1, 0)]))
    [2]
    """
    alive: set[int] = set()
    for change in changes:
        if not isinstance(change, _Mark):
            (alive.add if change[1] else alive.discard)(change[0])
    return frozenset(alive)


def _part(num_bytes: int, num_ranks: int) -> int:
    return -(-num_bytes // num_ranks)


def card_memory(
    profile: Profile,
    plan: Plan,
    device: Device,
    *,
    settings: AllocatorSettings | str = "",
    num_steps: int = NUM_STEPS,
    further: Sequence[int] = (),
) -> tuple[CardMemory, Simulated]:
    """Return what a plan takes of a card that torch's caching allocator serves, and the step that was simulated.

    Args:
        profile: what the step does.
        plan: a plan for the same model.
        device: the card.
        settings: as PYTORCH_CUDA_ALLOC_CONF has them.
        num_steps: how many steps to simulate.
        further: bytes of each further tensor that is on the card from the beginning.

    >>> from actmem.decision_rules import Rule
    >>> from actmem.devices import device
    >>> card_memory(Profile(), Plan([Rule("save")], [], "", ""), device("h100-80gb"))[0].reserved_bytes
    0
    """
    changes, simulated = step_changes(profile, plan)
    events: list[Event] = [Alloc(f"further {nth}", size) for nth, size in enumerate(further)]
    last = 0
    for last_begins, event in training_events(profile, changes, device.blas_workspace_bytes or 0, num_steps):
        last = len(events) if last_begins and not last else last
        events.append(event)
    memory = run_allocator(events, settings, with_curve=True)
    allocated = max((allocated for allocated, _ in memory.curve[last:]), default=0)
    reserved = memory.peak_reserved_bytes
    if profile.shard > 1:
        # What a rank gathers and scatters is known as a sum only. What rounding and fragmentation add to it is taken
        # from the allocations of a rank that only has its part of parameters, gradients and optimizer state.
        whole = memory.peak_requested_bytes - 2 * (device.blas_workspace_bytes or 0)
        allocated, reserved = (simulated.peak_bytes + each - whole for each in (allocated, reserved))
    requests = tuple(event.num_bytes if isinstance(event, Alloc) else 0 for event in events)
    outside = outside_torch(device, groups_of(profile))
    return CardMemory(allocated, max(allocated, reserved), outside, memory, requests), simulated
