"""`actmem fit`: the fastest plan for a budget, its cost, and the cost of the alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import actmem
from actmem.cli.commands import Fit
from actmem.cli.failures import Mistakes, shown_message
from actmem.cli.loaded_model import Loaded, load
from actmem.cli.schema import Document, project
from actmem.cli.screen import Screen, flops_text, ratio_text, seconds_text, table
from actmem.cli.shared import (
    ModelShown,
    Part,
    check_file,
    check_planning,
    described,
    document_of,
    measured,
    measures_of,
    options_of,
    parts_of,
    save_plan,
)
from actmem.cli.spread import StageShown, check_spread, fitted_stages, profiled_stages, show_stages
from actmem.devices import Device
from actmem.errors import ModeError
from actmem.layout import Layout
from actmem.parallelism import StageProfile
from actmem.plan import Plan
from actmem.planner import NAMED, Allowance, Frontier, allowance, requested
from actmem.planner import frontier as planner_frontier
from actmem.profiles import Profile
from actmem.settings import Split
from actmem.simulation import NAMES, cost_seconds, is_measured, on_card, step_seconds, with_stepping
from actmem.units import size

__all__ = ["FitShown", "run", "show"]

_TIMES = {"roofline": "by the roofline", "measured": "as measured here"}
_SUFFIXES = {"out": (".json", ".toml"), "report": (".html",), "timeline": (".json",)}


@dataclass(frozen=True, kw_only=True)
class PointShown(Document):
    """A plan or a mode on the memory-time frontier."""

    name: str
    peak_bytes: int
    step_time_ratio: float
    """Step time relative to saving everything."""
    replayed_flops: int
    fits: bool
    """Whether it stays within the budget."""


@dataclass(frozen=True, kw_only=True)
class FitShown(Document):
    """Output of `actmem fit`."""

    command: Literal["fit"] = "fit"
    model: ModelShown
    device: Device
    asked_bytes: int
    """The budget as typed."""
    headroom: float
    """The fraction of it that stays free."""
    budget_bytes: int
    """What is left."""
    peak_bytes: int
    """The predicted peak of the plan: bytes of tensors."""
    reserved_bytes: int | None
    """On a card: the most that torch's caching allocator takes from the driver. None elsewhere."""
    outside_bytes: int
    """On a card: what lies outside torch."""
    allocator: str
    """On a card: what PYTORCH_CUDA_ALLOC_CONF was assumed to be; "" for torch's defaults."""
    assumptions: tuple[str, ...]
    """What is not known of the card's kernels."""
    notes: tuple[str, ...]
    """What differs here from what was assumed."""
    peak_at: str
    peak_words: tuple[str, ...]
    """Where the peak is, what it consists of and what would lower it: one sentence each."""
    parts: tuple[Part, ...]
    """What the peak consists of. The sum is `peak_bytes`."""
    step_seconds: float
    """Time of forward and backward with everything saved."""
    times: Literal["roofline", "measured"]
    """Source of the times: the device's roofline, or a real step on this machine."""
    step_time_ratio: float
    """Step time relative to saving everything."""
    bound: float
    """Lower bound on the step time ratio within the budget."""
    gap: float
    """How much smaller the ratio of the best plan could be, at most."""
    time_limit_hit: bool
    """Whether the time limit stopped the search: another run may find another plan."""
    replayed_flops: int
    modes: tuple[PointShown, ...]
    """The named modes."""
    frontier: tuple[PointShown, ...]
    """The best plans at several budgets, without offloading, from the smallest peak to saving everything."""
    plan: dict[str, Any]
    """The plan file."""
    written: dict[str, str]
    """The files that were written: plan, report, timeline."""
    layout: Layout | None
    """How the job is spread over ranks, if it is."""
    place: int
    """The place of the pipeline that all of this is about: the slowest one."""
    stages: tuple[StageShown, ...]
    """Every place of the pipeline, if there is one."""


def run(asked: Fit, screen: Screen) -> tuple[FitShown, int]:
    """Find the plan and write the requested files."""
    mistakes = Mistakes()
    chosen = check_planning(asked, mistakes)
    layout = check_spread(asked, mistakes)
    _check_files(asked, mistakes)
    with mistakes.noted():
        if asked.frontier < 0 or asked.frontier == 1:
            raise ModeError(f"--frontier {asked.frontier} is not permitted. Expected at least 2 points, or 0 for none.")
    with mistakes.noted():
        if asked.allow and layout is not None:
            raise ModeError("--allow is for one process, and the other options spread the model over ranks. Omit it.")
    mistakes.raise_all()
    with screen.progress("building the model"):
        loaded = load(asked)
        device = measured(chosen, loaded.model)
    allowed = allowance(asked.budget, device, asked.headroom)
    if layout is None:
        with screen.progress("profiling one step, and searching for the best plan"):
            profile, plan = _alone(asked, loaded, device)
        stages, plans, shown_stages = [StageProfile(0, 0, profile, 1, 1)], [plan], list[StageShown]()
    else:
        with screen.progress("profiling one step"):
            stages = profiled_stages(asked, loaded, layout, device)
        with screen.progress("searching for the best plan"):
            plans, shown_stages = fitted_stages(stages, asked, allowed, device)
    slowest = max(shown_stages, key=lambda stage: (stage.busy, stage.peak_bytes)).pp if shown_stages else 0
    profile, plan = stages[slowest].profile, plans[slowest]
    parts, _ = parts_of(profile, plan)
    curve = None
    if asked.frontier:
        with screen.progress("searching for plans at other budgets") as told:
            curve = planner_frontier(profile, device, num_points=asked.frontier, progress=told)
    modes, points = _compared(profile, device, allowed, curve, plan)
    is_pipeline = layout is not None and len(stages) > 1
    written = _write(
        replace(asked, report=None) if is_pipeline else asked, profile, plan, device, allowed, curve, screen
    )
    if asked.out is not None and is_pipeline:
        for stage, its in zip(stages, plans, strict=True):
            save_plan(its, asked.out.with_stem(f"{asked.out.stem}.{stage.pp}"))
    if asked.report is not None and layout is not None and is_pipeline:
        from actmem.reporting import write_job_page

        write_job_page(asked.report, asked.model, layout, stages, plans, device, allowed.budget_bytes)
        written["report"] = str(asked.report)
    shown = project(
        FitShown,
        plan.predicted,
        model=described(loaded, profile.blocks, profile.shapes),
        device=device,
        asked_bytes=allowed.asked_bytes,
        parts=parts,
        step_seconds=step_seconds(profile, cost_seconds(profile, device)),
        times="measured" if is_measured(profile, device) else "roofline",
        modes=modes,
        frontier=points,
        plan=document_of(plan),
        written=written,
        layout=layout,
        place=slowest,
        stages=tuple(shown_stages) if len(stages) > 1 else (),
    )
    return shown, 0


def _alone(asked: Fit, loaded: Loaded, device: Device) -> tuple[Profile, Plan]:
    """Find the plan of a model that is not spread over ranks. Return the step as the plan has it, too."""
    request = requested(
        loaded.model,
        loaded.batch,
        budget=asked.budget,
        loss=loaded.loss,
        device=device,
        offload=asked.offload,
        headroom=asked.headroom,
        allocator=asked.allocator,
        **options_of(asked),
    )
    plan = request.plan(measures_of(asked))
    return on_card(with_stepping(request.profiled(plan.split)[0], plan), device), plan


def _check_files(asked: Fit, mistakes: Mistakes) -> None:
    """Record output files that could not be written, before the work starts."""
    if asked.report is not None:
        from actmem.reporting import check_installed

        check_installed()
    taken: dict[Path, str] = {}
    for option, suffixes in _SUFFIXES.items():
        path: Path | None = getattr(asked, option)
        if path is not None:
            with mistakes.noted():
                check_file(option, path, suffixes, taken)


def _compared(
    profile: Profile, device: Device, allowed: Allowance, curve: Frontier | None, plan: Plan
) -> tuple[tuple[PointShown, ...], tuple[PointShown, ...]]:
    """Return the named modes, and the plans of the frontier if it was solved."""
    told = plan.predicted
    assert told is not None
    beside_bytes = 0 if told.reserved_bytes is None else told.reserved_bytes + told.outside_bytes - told.peak_bytes

    def fits(peak_bytes: int) -> bool:
        return peak_bytes + beside_bytes <= allowed.budget_bytes

    if curve is None:
        predicted = {name: actmem.predict(profile, mode, device) for name, mode in NAMED.items()}
        return tuple(
            project(PointShown, p, name=n, peak_bytes=p.live_bytes, fits=fits(p.live_bytes))
            for n, p in predicted.items()
        ), ()
    modes, points = (
        tuple(project(PointShown, point, fits=fits(point.peak_bytes)) for point in several)
        for several in (curve.modes, curve.points)
    )
    return modes, points


def _write(
    asked: Fit,
    profile: Profile,
    plan: Plan,
    device: Device,
    allowed: Allowance,
    curve: Frontier | None,
    screen: Screen,
) -> dict[str, str]:
    """Write the requested files; return their paths by kind."""
    written: dict[str, str] = {}
    if asked.out is not None:
        save_plan(plan, asked.out)
        written["plan"] = str(asked.out)
    if asked.report is not None:
        from actmem.reporting import build, write_page

        with screen.progress("solving the plans of the page") as told:
            data = build(
                profile,
                plan,
                device,
                name=asked.model,
                asked_bytes=allowed.asked_bytes,
                offload=asked.offload,
                frontier=curve,
                progress=told,
            )
            write_page(data, asked.report)
        written["report"] = str(asked.report)
    if asked.timeline is not None:
        from actmem.reporting import write_timeline

        with screen.progress("writing the timeline"):
            write_timeline(asked.timeline, profile, plan, device)
        written["timeline"] = str(asked.timeline)
    return written


# --- for people -------------------------------------------------------------------------------------------------------


def show(shown: FitShown, screen: Screen) -> None:
    """Print the plan's cost as tables."""
    out, model = screen.out, shown.model
    out.print(model.name, style="bold", markup=False)
    out.print(
        f"{model.num_parameters:,} parameters, {model.num_blocks} blocks, {', '.join(model.shapes)}", markup=False
    )
    less = f", of which {shown.headroom:.0%} stay free: {size(shown.budget_bytes)}" if shown.headroom else ""
    out.print(f"{shown.device.name}, budget {size(shown.asked_bytes)}{less}\n", markup=False)
    out.print(_breakdown(shown))
    out.print(
        f"predicted peak   {size(shown.peak_bytes)} of {size(shown.budget_bytes)}, at {shown.peak_at}\n"
        f"predicted step   {ratio_text(shown.step_time_ratio)} of saving everything, which takes "
        f"{seconds_text(shown.step_seconds)} {_TIMES[shown.times]}; replays {flops_text(shown.replayed_flops)}\n"
        f"proof            no plan in this budget is below {shown.bound:.4f}x: the gap is at most {shown.gap:.2%}\n",
        markup=False,
    )
    if shown.reserved_bytes is not None:
        needed = shown.reserved_bytes + shown.outside_bytes
        out.print(
            f"on the card      {size(needed)} of {size(shown.budget_bytes)}: {size(shown.reserved_bytes)} reserved by "
            f"torch (allocator: {shown.allocator or 'the defaults'}), {size(shown.outside_bytes)} outside torch\n",
            markup=False,
        )
    if shown.layout is not None:
        out.print(f"{shown.layout!r}: {shown.layout.world} ranks", markup=False)
    if shown.stages:
        show_stages(shown.stages, screen)
        out.print(f"all else here is about place {shown.place}, the slowest\n", markup=False)
    for text in shown.assumptions:
        screen.paragraph(f"not known: {text}")
    for text in shown.notes:
        screen.paragraph(f"note: {shown_message(ModeError(text))}")
    if shown.time_limit_hit:
        out.print("stopped by the time limit before the search was done: another run may find another plan\n")
    for sentence in shown.peak_words:
        screen.paragraph(shown_message(ModeError(sentence)))
    out.print()
    out.print(_points("for comparison: the named modes", "mode", shown.modes))
    if shown.frontier:
        numbered = [replace(x, name=f"{n} of {len(shown.frontier)}") for n, x in enumerate(shown.frontier, 1)]
        without = ", without offloading" if "offload" in shown.plan else ""
        out.print(_points(f"memory against time: the best plans{without}", "plan", numbered))
    if "split" in shown.plan:
        pieces = Split(**shown.plan["split"])
        screen.paragraph(f"in pieces of tokens: {pieces!r}; sums over tokens are added in another order")
    rules: Sequence[object] = shown.plan["rules"]
    saved = shown.written.get("plan")
    use = f'actmem.FromPlan("{saved}")' if saved else "plan"
    more = "" if saved else "; --out plan.json writes it"
    out.print(f"the plan has {len(rules)} rule{'' if len(rules) == 1 else 's'}{more}. Use it:", markup=False)
    screen.copied("  ", f"actmem.apply(model, {use})")
    for what, path in shown.written.items():
        screen.note(f"wrote the {what}: {path}")


def _breakdown(shown: FitShown) -> object:
    made = table("the predicted peak", "category", "bytes", "of the peak")
    for part in shown.parts:
        if part.num_bytes:
            share = f"{part.num_bytes / shown.peak_bytes:.1%}"
            made.add_row(NAMES[part.category], size(part.num_bytes), share)
    made.add_section()
    made.add_row("peak", size(shown.peak_bytes), "")
    return made


def _points(title: str, what: str, points: Sequence[PointShown]) -> object:
    made = table(title, what, "peak", "step time", "replayed", "fits")
    for x in points:
        fits = "yes" if x.fits else "no"
        made.add_row(x.name, size(x.peak_bytes), ratio_text(x.step_time_ratio), flops_text(x.replayed_flops), fits)
    return made
