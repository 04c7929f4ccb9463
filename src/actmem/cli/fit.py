"""`actmem fit`: a plan for a budget, with what it costs and what others would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import actmem
from actmem.amounts import parse_budget, size
from actmem.cli.commands import Fit
from actmem.cli.devices import device_shown
from actmem.cli.failing import Mistakes, shown_message
from actmem.cli.loading import load
from actmem.cli.parts import parts_of
from actmem.cli.schema import FitShown, Point
from actmem.cli.screen import Screen, flops_text, ratio_text, seconds_text, table
from actmem.cli.shared import check_planning, described, document_of, measured, options_of
from actmem.cli.tomls import save_plan
from actmem.devices import Device
from actmem.errors import ModeError
from actmem.plan import Plan, Predicted
from actmem.planner import frontier as planner_frontier
from actmem.planner.categories import NAMES
from actmem.planner.choosing import is_accelerator
from actmem.planner.costing import cost_seconds, step_seconds
from actmem.planner.fitting import explained, fit_profile
from actmem.planner.frontier import NAMED
from actmem.profiles import Profile

__all__ = ["run", "show"]

_SUFFIXES = {"out": (".json", ".toml"), "report": (".html",), "timeline": (".json",)}


def run(asked: Fit, screen: Screen) -> tuple[FitShown, int]:
    """Plan, and write the files that were asked for."""
    mistakes = Mistakes()
    chosen = check_planning(asked, mistakes)
    _check_files(asked, mistakes)
    with mistakes.noted():
        if asked.frontier < 0 or asked.frontier == 1:
            raise ModeError(f"--frontier {asked.frontier} is not permitted. Expected 2 or more points, or 0 for none.")
    mistakes.raise_all()
    with screen.progress("building the model"):
        loaded = load(asked)
        device = measured(chosen, loaded.model)
    asked_bytes, headroom = parse_budget(asked.budget, device_bytes=device.memory_bytes), asked.headroom
    if headroom is None:
        headroom = 0.05 if is_accelerator(device) else 0.0
    with screen.progress("following one step"):
        profile = actmem.profile(loaded.model, loaded.batch, loss=loaded.loss, **options_of(asked))
    with screen.progress("looking for the best plan"):
        budget_bytes = int(asked_bytes * (1 - headroom))
        plan = fit_profile([profile], budget_bytes, device, offload=asked.offload, headroom=headroom)
        plan = explained(plan, [profile], device)
        parts, _ = parts_of(profile, plan)
    assert plan.predicted is not None
    modes, points = _curve(profile, device, plan.predicted, asked.frontier, screen)
    written = _write(asked, profile, plan, device, screen)
    p = plan.predicted
    shown = FitShown(
        model=described(loaded.name, loaded.source, loaded.model, profile),
        device=device_shown(device),
        asked_bytes=asked_bytes,
        headroom=headroom,
        budget_bytes=p.budget_bytes,
        peak_bytes=p.peak_bytes,
        peak_at=p.peak_at,
        peak_words=p.peak_words,
        parts=parts,
        step_seconds=step_seconds(profile, cost_seconds(profile, device)),
        step_time_ratio=p.step_time_ratio,
        bound=p.bound,
        gap=p.gap,
        replayed_flops=p.replayed_flops,
        modes=modes,
        frontier=points,
        plan=document_of(plan),
        written=written,
    )
    return shown, 0


def _check_files(asked: Fit, mistakes: Mistakes) -> None:
    """Note what could not be written, before the work is done."""
    if asked.report is not None:
        from actmem.page import check_installed

        check_installed()
    taken: dict[Path, str] = {}
    for option, suffixes in _SUFFIXES.items():
        path: Path | None = getattr(asked, option)
        if path is not None:
            with mistakes.noted():
                _check_file(option, path, suffixes, taken)


def _check_file(option: str, path: Path, suffixes: Sequence[str], taken: dict[Path, str]) -> None:
    if path.suffix not in suffixes:
        raise ModeError(f"--{option} {path} has another ending than {' or '.join(suffixes)}, which says the form.")
    if not path.resolve().parent.is_dir():
        raise ModeError(f"--{option} {path} lies in a folder that is not there. Run: mkdir -p {path.parent}")
    if (other := taken.setdefault(path.resolve(), option)) != option:
        raise ModeError(f"--{option} {path} is the file of --{other} too. Name another for one of them.")


def _curve(
    profile: Profile, device: Device, p: Predicted, num_points: int, screen: Screen
) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Return the named modes, and the best plans at several budgets."""

    def point(name: str, peak: int, ratio: float, flops: int) -> Point:
        fits = peak <= p.budget_bytes
        return Point(name=name, peak_bytes=peak, step_time_ratio=ratio, replayed_flops=flops, fits=fits)

    with screen.progress("looking for plans at other budgets") as told:
        if not num_points:
            found = {name: actmem.predict(profile, mode, device) for name, mode in NAMED.items()}
            named = [point(n, f.peak_bytes, f.step_time_ratio, f.replayed_flops) for n, f in found.items()]
            return tuple(named), ()
        curve = planner_frontier(profile, device, num_points=num_points, progress=told)
    made = [
        tuple(point(x.name, x.peak_bytes, x.step_time_ratio, x.replayed_flops) for x in several)
        for several in (curve.modes, curve.points)
    ]
    return made[0], made[1]


def _write(asked: Fit, profile: Profile, plan: Plan, device: Device, screen: Screen) -> dict[str, str]:
    written: dict[str, str] = {}
    if asked.out is not None:
        save_plan(plan, asked.out)
        written["plan"] = str(asked.out)
    if asked.report is not None:
        from actmem.page import build, write_page

        with screen.progress("solving the plans of the page") as told:
            data = build(
                profile,
                plan,
                device,
                name=asked.model,
                asked_bytes=parse_budget(asked.budget, device_bytes=device.memory_bytes),
                offload=asked.offload,
                progress=told,
            )
            write_page(data, asked.report)
        written["report"] = str(asked.report)
    if asked.timeline is not None:
        from actmem.page import write_timeline

        with screen.progress("writing the timeline"):
            write_timeline(asked.timeline, profile, plan, device)
        written["timeline"] = str(asked.timeline)
    return written


# --- for readers ------------------------------------------------------------------------------------------------------


def show(shown: FitShown, screen: Screen) -> None:
    """Print the outcome as tables."""
    out, model = screen.out, shown.model
    out.print(model.name, style="bold", markup=False)
    out.print(
        f"{model.num_parameters:,} parameters, {model.num_blocks} blocks, {', '.join(model.shapes)}", markup=False
    )
    less = f", less {shown.headroom:.0%} for the allocator: {size(shown.budget_bytes)}" if shown.headroom else ""
    out.print(f"{shown.device.name}, budget {size(shown.asked_bytes)}{less}\n", markup=False)
    out.print(_breakdown(shown))
    out.print(
        f"predicted peak   {size(shown.peak_bytes)} of {size(shown.budget_bytes)}, at {shown.peak_at}\n"
        f"predicted step   {ratio_text(shown.step_time_ratio)} of saving everything, which takes "
        f"{seconds_text(shown.step_seconds)} by the roofline; replays {flops_text(shown.replayed_flops)}\n"
        f"proof            no plan in this budget is below {shown.bound:.4f}x: the gap is at most {shown.gap:.2%}\n",
        markup=False,
    )
    for sentence in shown.peak_words:
        screen.paragraph(shown_message(ModeError(sentence)))
    out.print()
    out.print(_points("beside it: the named modes", "mode", shown.modes))
    if shown.frontier:
        numbered = [
            x.model_copy(update={"name": f"{n} of {len(shown.frontier)}"}) for n, x in enumerate(shown.frontier, 1)
        ]
        without = ", without offloading" if "offload" in shown.plan else ""
        out.print(_points(f"memory against time: the best plans{without}", "plan", numbered))
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


def _points(title: str, what: str, points: Sequence[Point]) -> object:
    made = table(title, what, "peak", "step time", "replayed", "fits")
    for x in points:
        fits = "yes" if x.fits else "no"
        made.add_row(x.name, size(x.peak_bytes), ratio_text(x.step_time_ratio), flops_text(x.replayed_flops), fits)
    return made
