"""From a budget to a plan for compiled blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from actmem.allocator import AllocatorSettings
from actmem.compilercompat import Compiler, compiler_of
from actmem.devices import Device
from actmem.errors import BudgetError, ModeError
from actmem.log_entries import LiveEntry, OperatorEntry, PhaseBegan
from actmem.plan import FitRecord, Plan
from actmem.planner.compiled_ladder import Ladder, Rung, climb
from actmem.profiles import Profile
from actmem.profiling import CompiledStep, KernelWorkspaces
from actmem.settings import Compiled
from actmem.simulation import groups_of, is_accelerator, outside_torch
from actmem.structure import Block
from actmem.units import size

__all__ = ["Compilation", "check_compiled", "compilation", "fit_ladder", "make_ladder"]

Compilation = tuple[Compiler, bool]
"""How a model is compiled, and whether it is one graph."""


def compilation(model: nn.Module, blocks: Sequence[Block], compiled: bool | Compiled | None) -> Compilation | None:
    """Return how a model is compiled, or is going to be; None if it is not.

    >>> from actmem.structure import find_blocks
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> compilation(model, find_blocks(model), None)
    >>> model.compile(backend="aot_eager")
    >>> compiler, is_whole = compilation(model, find_blocks(model), None)
    >>> compiler.name, is_whole
    ('aot_eager', True)

    Raises:
        ModeError: it is compiled in another way than `compiled` says, or some of its blocks are and some are not.
    """
    if compiled is False:
        return None
    if not (compiled is None or compiled is True or isinstance(compiled, Compiled)):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
        raise ModeError(
            f"compiled = {compiled!r} is not permitted. Expected True, False, or actmem.Compiled('blocks' or 'model', "
            "backend=...)."
        )
    told = Compiled() if compiled is True else compiled
    whole = compiler_of(model)
    each = [compiler_of(block.module) for block in blocks]
    wrapped = next((block.path for block in blocks if hasattr(block.module, "_orig_mod")), None)
    if wrapped is not None:
        raise ModeError(
            f"{wrapped} is what torch.compile(block) returned, a module around the block, and a budget is planned for "
            "the block itself. Compile it in place, block.compile(), or plan before it is compiled: "
            "actmem.fit(..., compiled=True)."
        )
    names = sorted({found.name for found in each if found is not None})
    seen: Compilation | None = None
    if whole is not None:
        seen = whole, True
    elif len(names) > 1 or (names and None in each):
        raise ModeError(
            f"{sum(found is not None for found in each)} of {len(each)} blocks are compiled, by {' and '.join(names)}, "
            "and a budget is planned for blocks that all run in the same way. Compile all of them alike, or none."
        )
    elif each and each[0] is not None:
        seen = each[0], False
    if seen is None:
        return None if told is None else (Compiler(told.backend, told.backend), told.what == "model")
    if isinstance(compiled, Compiled) and (seen[0].name, seen[1]) != (compiled.backend, compiled.what == "model"):
        raise ModeError(
            f"{compiled!r} is not how the model is compiled: {_said(seen)}. Leave compiled out: what is compiled "
            "already is seen."
        )
    return seen


def _said(how: Compilation) -> str:
    return f"{'the whole model' if how[1] else 'each block'}, by {how[0].name}"


def make_ladder(
    model: nn.Module,
    blocks: Sequence[Block],
    example: Any,
    loss: Callable[[Any], Tensor] | None,
    how: Compilation,
    profile: Profile,
    known: Device,
    *,
    fake: bool,
) -> Ladder:
    """Compile a model under several plans, and return those that are worth having."""
    kernels = None if known.has_caching_allocator else KernelWorkspaces()  # the CPU's say nothing about a card's
    step = CompiledStep(
        model,
        blocks,
        example,
        loss,
        how[0],
        whole=how[1],
        fake=fake,
        accumulates=profile.microbatches > 1,
        kernels=kernels,
    )
    with step:
        ladder = climb(step, profile, known, whole=how[1])
    unknown = () if not fake else ("kernels",) if kernels is None else kernels.unknown
    return replace(ladder, unknown_workspaces=unknown)


def check_compiled(allocator: str | AllocatorSettings, **given: object) -> None:
    """Refuse arguments that cannot be combined with compiled blocks."""
    if allocator:
        raise ModeError(
            f"allocator = {allocator!r} cannot be combined with compiled blocks: what the caching allocator adds to "
            "their graphs is not simulated. Leave it out, or plan for blocks in eager: compiled=False."
        )
    named = [name for name, value in given.items() if value not in (None, (), [], 1)]
    if named:
        raise ModeError(
            f"{' and '.join(named)} cannot be combined with compiled blocks: their plan is for one example, and only "
            "saves and recomputes. Leave it out, or plan for blocks in eager: compiled=False."
        )


def fit_ladder(
    ladder: Ladder, budget_bytes: int, known: Device, how: Compilation, *, headroom: float = 0.0, fake: bool = True
) -> Plan:
    """Take the fastest plan of a ladder that fits.

    Raises:
        BudgetError: none does.
    """
    profile = ladder.profile
    # Numbers that autograd holds outside the graphs are in the same memory.
    numbers_bytes = profile.numbers_bytes if fake and not is_accelerator(known) else 0
    limit_bytes = budget_bytes - numbers_bytes
    if known.has_caching_allocator:
        limit_bytes -= outside_torch(known, groups_of(profile)) + 2 * (known.blas_workspace_bytes or 0)
    stepping = _optimizer_peak(profile)
    chosen = next((rung for rung in ladder.rungs if _peak(profile, rung, stepping) <= limit_bytes), None)
    if chosen is None:
        raise BudgetError(_refusal(ladder, budget_bytes, budget_bytes - limit_bytes, stepping, how, headroom))
    whole = sum(_roofline(profile, known, entry.cost) for entry in profile.log if isinstance(entry, OperatorEntry))
    ratio = 1 + (chosen.seconds - ladder.plain.seconds) / whole if whole else 1.0
    bound = min(ratio, 1 + (ladder.least_seconds - ladder.plain.seconds) / whole) if whole else 1.0
    plan = ladder.plan(chosen, f"fit(budget={budget_bytes})")
    record = FitRecord(
        peak_bytes=_peak(profile, chosen, stepping) + numbers_bytes,
        budget_bytes=budget_bytes,
        step_time_ratio=ratio,
        replayed_flops=max(0, chosen.flops - ladder.plain.flops),
        bound=bound,
        gap=ratio - bound,
        device=known.name,
        optimizer=profile.optimizer,
        shapes=profile.shapes,
        peak_at=_where(profile, chosen, stepping),
        headroom=headroom,
        microbatches=profile.microbatches,
        routing="none" if profile.routing == "none" else "any" if fake else "real",
        modules=profile.modules,
        compiled=_said(how),
        assumptions=_unknowns(known, ladder.unknown_workspaces),
    )
    return Plan(plan.rules, plan.blocks, plan.fingerprint, plan.mode, exact=True, predicted=record)


def _unknowns(known: Device, workspaces: Sequence[str]) -> tuple[str, ...]:
    """Name what a prediction for graphs leaves out.

    >>> from actmem.devices import device
    >>> print(*_unknowns(device("h100-80gb"), ["kernels"]), sep="; ")
    workspaces of kernels (fake=False measures them); what the caching allocator adds
    """
    found = [f"workspaces of {', '.join(workspaces)} (fake=False measures them)"] if workspaces else []
    return tuple([*found, "what the caching allocator adds"] if known.has_caching_allocator else found)


def _roofline(p: Profile, known: Device, cost: int) -> float:
    c = p.costs[cost]
    return known.seconds(c.flops, c.moved_bytes, c.dtype) if c.flops or c.moved_bytes else 0.0


def _optimizer_peak(p: Profile) -> int:
    """Return the most bytes alive once backward has ended."""
    end = next((at for at, e in enumerate(p.log) if isinstance(e, PhaseBegan) and e.name == "end"), len(p.log))
    return max((entry.live_bytes for entry in p.log[end:] if isinstance(entry, LiveEntry)), default=0)


def _peak(p: Profile, rung: Rung, stepping: int) -> int:
    return max(rung.peak_bytes + p.optimizer_bytes, stepping)


def _where(p: Profile, rung: Rung, stepping: int) -> str:
    if rung.peak_bytes + p.optimizer_bytes < stepping:
        return "the optimizer's step"
    where = f" in {p.layers[rung.peak_layer].path or 'the model itself'}" if rung.peak_layer >= 0 else ""
    return f"{rung.peak_op}{where}"


def _refusal(
    ladder: Ladder, budget_bytes: int, numbers_bytes: int, stepping: int, how: Compilation, headroom: float
) -> str:
    p = ladder.profile
    least = min(ladder.rungs, key=lambda rung: rung.peak_bytes)
    peak = _peak(p, least, stepping) + numbers_bytes
    enough = math.ceil(peak / (1 - headroom) / 2**20) * 2**20
    less = f" (after {headroom:.0%} that stay free)" if headroom else ""
    what = "the whole model" if how[1] else "each block"
    return (
        f"no plan fits {size(budget_bytes)}{less} where {what} is compiled by {how[0].name}. The smallest peak is "
        f"{size(peak)}, at {_where(p, least, stepping)}, of the plans that were tried.\n"
        "What would help: a smaller batch, or shorter sequences.\n"
        "What would help: blocks in eager, where a plan may decide more: actmem.fit(..., compiled=False) and "
        "actmem.apply(model, plan, engine='tape').\n"
        f"Or allow it: budget={enough} ({size(enough)})."
    )
