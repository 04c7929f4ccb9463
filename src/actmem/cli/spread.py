"""Layouts on the command line: from options to a layout, and from a layout to a plan for each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from actmem.cli.commands import Fit
from actmem.cli.failures import Mistakes
from actmem.cli.loaded_model import Loaded
from actmem.cli.schema import Document
from actmem.cli.screen import Screen, ratio_text, table
from actmem.devices import Device
from actmem.errors import ModeError
from actmem.expert_loads import ExpertCounts, Quantile, Routing, check_routing
from actmem.layout import Layout
from actmem.parallelism import StageProfile, profile_stages
from actmem.plan import Plan
from actmem.planner import Allowance, fit_job, fit_profiles
from actmem.profiles import Profile, with_collectives
from actmem.simulation import is_accelerator, may_communicate, on_card, predict
from actmem.units import size

__all__ = [
    "StageShown",
    "asked_layout",
    "asked_routing",
    "check_spread",
    "fitted_stages",
    "profiled_stages",
    "show_stages",
]

_SIZES = ("dp_shard", "dp_replicate", "tp", "cp", "ep", "pp")


@dataclass(frozen=True, kw_only=True)
class StageShown(Document):
    """What the ranks at one place of a pipeline take under their plan."""

    pp: int
    """Which place, from 0."""
    rank: int
    """The first rank there."""
    num_blocks: int
    peak_bytes: int
    step_time_ratio: float
    """Step time relative to saving everything, without the time in which the pipeline waits."""
    busy: float
    """The part of the job's step in which they compute or communicate; the rest is waiting."""


def asked_layout(asked: Fit) -> Layout | None:
    """Return the layout that the options describe; None if none of them was given.

    >>> asked_layout(Fit("llama-3.1-8b", budget="72GiB", tp=8, pp=4))
    Layout(tp=8, pp=4)

    Raises:
        ModeError: the layout is not possible, its file cannot be read, or both were given.
    """
    given = [f.name for f in fields(Layout) if f.name != "microbatches" and getattr(asked, f.name) != _usual(f.name)]
    if asked.layout is not None:
        given += ["microbatches"] if asked.microbatches > 1 else []
        if given:
            raise ModeError(f"--layout cannot be combined with --{given[0].replace('_', '-')}. Write it in the file.")
        try:
            text = asked.layout.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModeError(f"the layout file {str(asked.layout)!r} cannot be read: {error}. Name another.") from None
        return Layout.from_toml(text) if asked.layout.suffix == ".toml" else Layout.from_json(text)
    if not given:
        return None
    return Layout(
        **{name: getattr(asked, name) for name in _SIZES},
        sequence_parallel=asked.sequence_parallel,
        reshard_after_forward=asked.reshard_after_forward,
        schedule=asked.schedule or "",
        virtual=asked.virtual or 0,
        microbatches=asked.microbatches if asked.microbatches > 1 or asked.pp == 1 else 0,
    )


def asked_routing(asked: Fit) -> Routing:
    """Return what to assume of routers, as the option says it.

    >>> asked_routing(Fit("mixtral-8x7b", budget="72GiB", dp_shard=8, ep=8, routing="0.99"))
    Quantile(fraction=0.99)

    Raises:
        ModeError: it is not a routing, or its file has no counts.
    """
    if asked.routing.endswith(".json"):
        return ExpertCounts.read(asked.routing)
    try:
        fraction = float(asked.routing)
    except ValueError:
        check_routing(asked.routing, by_rank=True)
        return asked.routing
    return Quantile(fraction)


def _usual(name: str) -> object:
    return next(field.default for field in fields(Fit) if field.name == name)


def check_spread(asked: Fit, mistakes: Mistakes) -> Layout | None:
    """Record mistakes in the layout. Returns the layout that was asked for, if any."""
    layout = None
    with mistakes.noted():
        layout = asked_layout(asked)
    with mistakes.noted():
        asked_routing(asked)
        if layout is None and asked.routing != "balanced":
            raise ModeError(f"--routing {asked.routing} needs a layout, such as --dp-shard 8 --ep 8.")
    if layout is None:
        return None
    refused = {
        "shard": asked.shard != 1,
        "optimizer-dtype": asked.optimizer_dtype is not None,
        "timeline": asked.timeline is not None and layout.pp > 1,
        "fake": not asked.fake,
    }
    for name in (name for name, is_given in refused.items() if is_given):
        with mistakes.noted():
            raise ModeError(
                f"--{name} cannot be combined with a layout ({layout!r}): its ranks are built and profiled by torch's "
                "own functions, on tensors without bytes. Omit it."
            )
    return layout


def profiled_stages(asked: Fit, loaded: Loaded, layout: Layout, device: Device) -> list[StageProfile]:
    """Profile the job: one rank for each place of the pipeline."""
    if loaded.source == "function" and layout.pp > 1 and loaded.loss is not None:
        raise ModeError("a pipeline computes the loss of a language model, not that of a function. Omit --pp.")
    found = profile_stages(
        loaded.model,
        loaded.batch,
        layout,
        loss=loaded.loss,
        optimizer=None if asked.optimizer == "none" else asked.optimizer,
        together=True if is_accelerator(device) else None,
        routing=asked_routing(asked),
    )
    return [replace(s, profile=_planned(s.profile, device)) for s in found]


def _planned(profile: Profile, device: Device) -> Profile:
    """Prepare a profile as `fit_job` does."""
    return with_collectives(on_card(profile, device), again=may_communicate(profile, device))


def fitted_stages(
    stages: Sequence[StageProfile], asked: Fit, allowed: Allowance, device: Device
) -> tuple[list[Plan], list[StageShown]]:
    """Find the plan of each stage, all together; of a model that is not spread, the plan of its one process."""
    if stages[0].profile.place is None:
        only = [stage.profile for stage in stages]
        return [fit_profiles(only, allowed, device, offload=asked.offload, allocator=asked.allocator)], []
    job = fit_job(
        [stage.profile for stage in stages],
        budget=asked.budget,
        device=device,
        offload=asked.offload,
        headroom=asked.headroom,
        allocator=asked.allocator,
    )
    parts = {part.ranks[0]: part for part in job.parts}
    shown: list[StageShown] = []
    for stage in stages:
        told = predict(stage.profile, parts[stage.rank].plan, device)
        shown.append(
            StageShown(
                pp=stage.pp,
                rank=stage.rank,
                num_blocks=len(stage.profile.blocks),
                peak_bytes=told.live_bytes,
                step_time_ratio=told.step_time_ratio,
                busy=parts[stage.rank].busy,
            )
        )
    return [parts[stage.rank].plan for stage in stages], shown


def show_stages(stages: Sequence[StageShown], screen: Screen) -> None:
    """Print a table of the stages."""
    made = table("the stages of the pipeline", "place", "first rank", "blocks", "peak", "step time", "busy")
    for x in stages:
        ratio = ratio_text(x.step_time_ratio)
        made.add_row(str(x.pp), str(x.rank), str(x.num_blocks), size(x.peak_bytes), ratio, f"{100 * x.busy:.0f} %")
    screen.out.print(made)
