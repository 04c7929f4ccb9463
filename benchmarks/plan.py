"""What a fitted plan promises: a true peak, less time than any named mode, a proven gap, and a short search.

Four parts. *True*: at many budgets the predicted peak, the measured peak and the budget, and the gradients bit for bit;
for comparison, the compiler's own budget on the same model. *Good*: at the measured peaks of torch's forms, what the
fitted plan runs again and how long it takes. *Proven*: the gap at each of those budgets. *Fast*: the seconds that the
planner takes for large models, each in its own process.

Peaks are `actmem.measure`'s: all tensors alive, with the gradients that the step creates and without an optimizer,
unless a name says AdamW. *True* plans for an H100 by its roofline, so that the figures repeat on every machine; *Good*
plans for this machine, and times steps on one thread, in turn. torch's `sac_ilp` is not included: it gets operator
times from torch's `SACEstimator`, which has them for CUDA only.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import actmem
from actmem import ops
from actmem.cli import demo
from actmem.compat.torchtitan import CompilerBudget
from actmem.planner import profile_fit
from actmem.planner.cost_frontier import NAMED
from actmem.planner.solver import Solution, smallest_peak, solve
from actmem.structure import find_blocks
from benchmarks import compile as compiling
from benchmarks.jobs import most_resident_bytes
from benchmarks.models import ResNetLike, UNetLike, train_step
from benchmarks.outcome import Bound, Outcome

ROOFLINE = "h100-80gb"
DEVICE = actmem.device(ROOFLINE).tensors_only()
"""Of that speed, where a budget is a bound on the bytes of tensors: what a CPU measures."""
NUM_ATTEMPTS = 3
NUM_REPETITIONS = 7
EXACT_LIMIT, FAKE_MOE_LIMIT = 1.005, 1.05
"""Predicted over measured peak, where shapes are known, and where routing is assumed."""
GAP_LIMIT = {False: 0.005, True: 0.01}
"""Of a step's time, for dense and for sparse models."""
LEAST_GAP_LIMIT = {False: 0.005, True: 0.05}
"""The same at the smallest peak, where few plans are left, and they are hard to find."""
NEAR_LEAST = 1.05
"""How much more than the proven minimum a plan for time may replay, where that minimum is above a bound."""
FRACTIONS = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Of the compiler's budget."""


@dataclass(frozen=True)
class Scale:
    """The size of the models."""

    dim: int = 256
    ffn: int = 704
    batch: int = 2
    length: int = 256
    vocab: int = 512
    num_layers: tuple[int, ...] = (4, 12)
    width: int = 32
    side: int = 64


@dataclass(frozen=True)
class Case:
    """A model to plan for. Called with its batch it returns the loss."""

    name: str
    make: Callable[[], nn.Module]
    batch: tuple[Tensor, ...]
    sparse: bool = False
    fake: bool = True
    """Whether the plan comes from tensors without bytes, or from a step that was run."""
    optimizer: str | None = None
    timed: bool = True
    """Whether it is compared with torch's forms."""


@dataclass(frozen=True)
class Large:
    """A model of the catalogue, and the number of ranks it is sharded over: so many that activations count."""

    name: str
    shard: int
    num_layers: int | None = None
    sequence: int = 8192
    sparse: bool = False
    at_least: bool = False
    """Plan at the smallest peak, not midway between it and that of saving everything."""


LARGE = (
    Large("llama-3.1-8b", 1),
    Large("llama-3.1-70b", 64),
    Large("llama-3.1-405b", 512),
    Large("qwen3-235b-a22b", 256, sparse=True),
    Large("deepseek-v3", 512, sparse=True),
)
HARD = (
    (Large("deepseek-v3", 256, sparse=True, at_least=True), 2.5),
    (Large("deepseek-v3", 256, sequence=4096, sparse=True, at_least=True), 6.0),
)
"""Where few plans are left, and a search takes longest. Its seconds over those of the profile are bounded, both of the
processor: a busy or slower machine changes both."""
MORE_LAYERS = (Large("llama-3.1-405b", 512, 32), Large("llama-3.1-405b", 512))
"""The same model with few and with many layers."""


def run(
    scale: Scale | None = None,
    *,
    num_budgets: int = 8,
    num_repetitions: int = NUM_REPETITIONS,
    fractions: Sequence[float] = FRACTIONS,
    large: Sequence[Large] = LARGE,
    hard: Sequence[tuple[Large, float]] = HARD,
    more_layers: Sequence[Large] = MORE_LAYERS,
    only: Sequence[str] = (),
) -> Outcome:
    """Plan, apply, measure and time everything, and compare it with the bounds.

    Args:
        scale: the size of the models that are really trained.
        num_budgets: the number of budgets at which each is planned, applied and verified.
        num_repetitions: how often each step is timed.
        fractions: what to ask the compiler for; none to skip it.
        large: the models that the planner is timed for.
        hard: the models that are planned at their smallest peak, and the bound of each.
        more_layers: one model with few and with many layers; none to skip the comparison.
        only: the names of the models to train; none for all.
    """
    scale = scale or Scale()
    chosen = [case for case in cases(scale) if not only or case.name in only]
    settings = {**dataclasses.asdict(scale), "num_budgets": num_budgets, "num_repetitions": num_repetitions}
    outcome = Outcome("plan", {**settings, "true_for": ROOFLINE, "good_for": "this machine"})
    outcome.exact["torch's sac_ilp"] = {"left_out": "its operator times come from CUDA alone (torch's SACEstimator)"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case in chosen:
            _true(outcome, case, num_budgets)
        if fractions:
            _compiler(outcome, chosen[0], fractions)
        for case in chosen:
            if case.timed:
                _good(outcome, case, num_repetitions)
    finally:
        torch.set_num_threads(threads)
    for each in large:
        _fast(outcome, each)
    for each, limit in hard:
        _hard(outcome, each, limit)
    if more_layers:
        _layers(outcome, more_layers)
    return outcome


def cases(scale: Scale) -> list[Case]:
    """Return the models: Llama-like ones of several depths, a mixture of experts, a ResNet-like one and a U-Net."""
    found: list[Case] = []
    for num_layers in scale.num_layers:
        size = demo.Size(
            dim=scale.dim,
            num_layers=num_layers,
            ffn=scale.ffn,
            vocab=scale.vocab,
            batch=scale.batch,
            length=scale.length,
        )
        found.append(Case(f"Llama-like, {num_layers} layers", partial(demo.LlamaLike, size), size.tokens()))
    with_state = dataclasses.replace(found[0], name=f"{found[0].name}, AdamW", optimizer="adamw", timed=False)
    shape = compiling.Shape(
        dim=scale.dim, ffn=scale.ffn, vocab=scale.vocab, batch=scale.batch, length=scale.length, num_layers=4
    )
    experts = Case(
        "MoE", partial(compiling.build, shape, "moe that breaks the graph"), (shape.tokens(), shape.tokens()), True
    )
    real = dataclasses.replace(experts, name="MoE, profiled for real", fake=False, timed=False)
    drawn = torch.Generator().manual_seed(1)
    images = torch.randn(4 * scale.batch, 3, scale.side // 2, scale.side // 2, generator=drawn)
    classes = torch.randint(10, (4 * scale.batch,), generator=drawn)
    larger = torch.randn(scale.batch, 3, scale.side, scale.side, generator=drawn)
    residual = Case("ResNet-like", partial(ResNetLike, scale.width), (images, classes))
    across = Case("U-Net", partial(UNetLike, scale.width), (larger, larger))
    return [*found, with_state, experts, real, residual, across]


# ---------------------------------------------------------------- true


def _true(outcome: Outcome, case: Case, num_budgets: int) -> None:
    """Fit, apply, measure and verify at budgets from the smallest feasible one to the plain peak."""
    model = case.make()
    profile = actmem.profile(model, case.batch, fake=case.fake, optimizer=case.optimizer)
    least, most = smallest_peak(profile)[0], _measured(case, "plain").peak_bytes
    modes = {name: actmem.predict(profile, mode, DEVICE) for name, mode in NAMED.items()}
    found: list[dict[str, Any]] = []
    for nth in range(num_budgets):
        budget = least + (most - least) * nth // (num_budgets - 1)
        plan = _fit(case, model, budget, DEVICE)
        measured = _measured(case, plan)
        fitting_modes = [p.step_time_ratio for p in modes.values() if p.peak_bytes <= budget]
        assert plan.predicted is not None
        figures = {
            "budget_bytes": budget,
            "predicted_bytes": plan.predicted.peak_bytes,
            "peak_bytes": measured.peak_bytes,
            "replayed_flops": measured.replayed_flops,
            "predicted_time": plan.predicted.step_time_ratio,
            "best_mode_time": min(fitting_modes) if fitting_modes else "none fits",
            "gap": plan.predicted.gap,
            "bitwise": actmem.verify(model, case.batch, plan).ok,
        }
        found.append(figures)
        outcome.exact[f"{case.name}, budget {nth} of {num_budgets - 1}"] = figures
    _bound_true(outcome, case, found)


def _bound_true(outcome: Outcome, case: Case, found: list[dict[str, Any]]) -> None:
    ratios = [figures["predicted_bytes"] / figures["peak_bytes"] for figures in found]
    above = FAKE_MOE_LIMIT if case.sparse and case.fake else EXACT_LIMIT
    below = 1.0 if case.sparse and case.fake else EXACT_LIMIT
    pairs = itertools.pairwise(figures["peak_bytes"] for figures in found)
    above_it = [figures["gap"] for figures in found[1:]]
    to_modes = [f["predicted_time"] / f["best_mode_time"] for f in found if f["best_mode_time"] != "none fits"]
    outcome.bounds += [
        Bound(f"{case.name}: predicted / measured peak, highest", max(ratios), above),
        Bound(f"{case.name}: measured / predicted peak, highest", max(1 / ratio for ratio in ratios), below),
        Bound(
            f"{case.name}: measured peak / budget, highest", max(f["peak_bytes"] / f["budget_bytes"] for f in found), 1
        ),
        Bound(f"{case.name}: less budget and a higher peak", sum(less > more for less, more in pairs), 0),
        Bound(f"{case.name}: predicted time / best named mode's that fits, highest", max(to_modes), 1 + 1e-9),
        Bound(f"{case.name}: gap at the smallest peak", found[0]["gap"], LEAST_GAP_LIMIT[case.sparse]),
        Bound(f"{case.name}: gap above it, highest", max(above_it, default=0.0), GAP_LIMIT[case.sparse]),
        Bound(f"{case.name}: plans that change a bit", sum(not f["bitwise"] for f in found), 0),
    ]


def _fit(case: Case, model: nn.Module, budget: int, device: actmem.Device | None) -> actmem.Plan:
    settings: dict[str, Any] = {"fake": case.fake, "optimizer": case.optimizer}
    return actmem.fit(model, case.batch, budget=budget, device=device, headroom=0, **settings)


def _measured(case: Case, form: str | actmem.Plan) -> actmem.Measurement:
    """Measure the third step of a fresh model: the first is observed, and the second knows what to hold."""
    model = _built(case, form)
    optimizer = torch.optim.AdamW(model.parameters()) if case.optimizer else None

    def step() -> None:
        train_step(model, case.batch)
        if optimizer is not None:
            optimizer.step()

    for _ in range(2):
        step()
    model.zero_grad()
    return _tensors(actmem.measure(step, model=model, optimizer=optimizer))


# ---------------------------------------------------------------- the compiler's budget


def _compiler(outcome: Outcome, case: Case, fractions: Sequence[float]) -> None:
    """Measure the compiler's budget, and fitted plans of as many budgets, on one model."""
    import torch._functorch.config as functorch_config

    plain, torch_selective = _measured(case, "plain"), _measured(case, "torch selective")
    least = smallest_peak(actmem.profile(case.make(), case.batch, optimizer=None))[0]
    peaks: dict[str, list[int]] = {"the compiler's budget": [], "fitted": []}
    cheapest = inf
    with compiling.quiet(), functorch_config.patch(enable_autograd_cache=False):  # its key does not include the solver
        for fraction in fractions:
            compiled = _measured_compiled(case, fraction)
            fitted = _measured(
                case,
                _fit(case, case.make(), least + int((plain.peak_bytes - least) * fraction), DEVICE),
            )
            for who, measured in (("the compiler's budget", compiled), ("fitted", fitted)):
                again = _flops(measured) - _flops(plain)
                peaks[who].append(measured.peak_bytes)
                row = {"peak_bytes": measured.peak_bytes, "saved_bytes": measured.saved_bytes, "again_flops": again}
                outcome.exact[f"{case.name}: {who}, {fraction}"] = row
            if compiled.peak_bytes <= torch_selective.peak_bytes:
                cheapest = min(cheapest, (_flops(compiled) - _flops(plain)) / torch_selective.replayed_flops)
    for who, theirs in peaks.items():
        outcome.exact[f"{case.name}: {who}, all"] = {
            "less_budget_and_a_higher_peak": sum(less > more for less, more in itertools.pairwise(theirs)),
            "worst_rise": max(less / min(theirs[i:]) for i, less in enumerate(theirs)),
        }
    if cheapest < inf:
        outcome.exact[f"{case.name}: the compiler's budget, at the peak of torch selective"] = {
            "flops_to_torch_selective": cheapest
        }


def _measured_compiled(case: Case, fraction: float) -> actmem.Measurement:
    torch._dynamo.reset()
    model = case.make()
    call: Any = torch.compile(model, backend="aot_eager")

    def step() -> None:
        model.zero_grad()
        call(*case.batch).backward()

    with CompilerBudget(fraction).apply(model):
        for _ in range(2):
            step()
        model.zero_grad()
        return _tensors(actmem.measure(step, model=model))


def _tensors(found: actmem.Measurement) -> actmem.Measurement:
    """Take the peak of tensors: a budget covers them, and headroom covers what kernels allocate for themselves."""
    return dataclasses.replace(found, peak_bytes=found.tensor_bytes)


def _flops(measured: actmem.Measurement) -> int:
    return measured.forward_flops + measured.backward_flops + measured.replayed_flops


# ---------------------------------------------------------------- good


def _good(outcome: Outcome, case: Case, num_repetitions: int) -> None:
    """Fit at the measured peaks of torch's forms, and compare replayed work and time."""
    model = case.make()
    theirs = {form: _measured(case, form) for form in ("torch selective", "torch full")}
    budgets = {
        "torch selective's peak": ("torch selective", 1.0, 0.5),
        "1.06 of torch full's peak": ("torch full", 1.06, 0.9),
        "torch full's peak": ("torch full", 1.0, None),
    }
    profile = actmem.profile(model, case.batch, optimizer=None)
    modes = {name: actmem.predict(profile, mode) for name, mode in NAMED.items()}
    plans: dict[str, actmem.Plan] = {}
    highest, gaps = 0.0, []
    for name, (form, factor, limit) in budgets.items():
        budget = int(theirs[form].peak_bytes * factor)
        plan = plans[name] = _fit(case, model, budget, None)
        measured = _measured(case, plan)
        assert plan.predicted is not None
        ratio = measured.replayed_flops / theirs[form].replayed_flops
        gaps.append(plan.predicted.gap)
        mode_times = [p.step_time_ratio for p in modes.values() if p.peak_bytes <= budget]
        if mode_times:
            highest = max(highest, plan.predicted.step_time_ratio / min(mode_times))
        outcome.measured[f"{case.name}: fitted to {name}"] = {
            "budget_bytes": budget,
            "peak_bytes": measured.peak_bytes,
            "replayed_flops": measured.replayed_flops,
            "torch_replayed_flops": theirs[form].replayed_flops,
            "to_torch": ratio,
            "predicted_time": plan.predicted.step_time_ratio,
            "gap": plan.predicted.gap,
        }
        peak = measured.peak_bytes / budget
        outcome.bounds.append(Bound(f"{case.name}, fitted to {name}: peak / budget", peak, 1.0, exact=False))
        least = _least_flops(profile, budget) / theirs[form].replayed_flops
        outcome.measured[f"{case.name}: fitted to {name}"]["least_to_torch"] = least
        if limit is not None:
            # Where provably no plan of this budget keeps the bound, the plan must be close to the possible minimum.
            what = f"{case.name}, fitted to {name}: replayed FLOPs / torch's (no plan can be below {least:.3f})"
            outcome.bounds.append(Bound(what, ratio, max(limit, NEAR_LEAST * least), exact=False))
    what = f"{case.name}, fitted to torch's peaks"
    outcome.bounds.append(Bound(f"{what}: gap, highest", max(gaps), GAP_LIMIT[case.sparse], exact=False))
    if highest:
        what = f"{what}: predicted time / best named mode's that fits, highest"
        outcome.bounds.append(Bound(what, highest, 1 + 1e-9, exact=False))
    _time(outcome, case, plans, num_repetitions)


def _least_flops(profile: actmem.Profile, budget: int) -> float:
    """Return a lower bound on the FLOPs that any plan within a budget replays: the bound of a plan for FLOPs alone."""
    flops = [float(cost.flops) for cost in profile.costs]
    return solve(profile, flops, budget, step_seconds=sum(flops)).bound_seconds


def _time(outcome: Outcome, case: Case, plans: dict[str, actmem.Plan], num_repetitions: int) -> None:
    """Time torch's forms and the plans in turn. A ratio above its bound is measured again, and the best counts."""
    ours, theirs = "fitted to torch selective's peak", "torch selective"
    forms: dict[str, str | actmem.Plan] = {form: form for form in ("plain", "torch full", theirs)}
    forms |= {f"fitted to {name}": plan for name, plan in plans.items()}
    steps = {name: partial(_seconds, _built(case, form), case.batch) for name, form in forms.items()}
    best, tried = inf, []
    for _ in range(NUM_ATTEMPTS):
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for nth in range(-2, num_repetitions):  # the first two warm up
            for name in steps if nth % 2 else reversed(steps):
                taken = steps[name]()
                if nth >= 0:
                    seconds[name].append(taken)
        ratio = _ratio(seconds[ours], seconds[theirs])
        tried.append(f"{ratio:.3f}")
        if ratio < best:
            best = ratio
            for name, taken in seconds.items():
                outcome.measured[f"{case.name}: {name}, time"] = {
                    "step_seconds": median(taken),
                    "to_plain": _ratio(taken, seconds["plain"]),
                    "to_torch_selective": _ratio(taken, seconds[theirs]),
                }
        if best <= 1:
            break
    outcome.measured[f"{case.name}: every attempt"] = {"to_torch_selective_tried": ", ".join(tried)}
    outcome.bounds.append(Bound(f"{case.name}, {ours}: time / torch's", best, 1.0, exact=False))


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def _seconds(model: nn.Module, batch: tuple[Tensor, ...]) -> float:
    model.zero_grad()
    started = perf_counter()
    model(*batch).backward()
    return perf_counter() - started


def _built(case: Case, form: str | actmem.Plan) -> nn.Module:
    """Build the model plain, under one of torch's forms on every block, or under a plan."""
    model = case.make()
    if isinstance(form, actmem.Plan):
        actmem.apply(model, form)
    elif form != "plain":
        contexts = {} if form == "torch full" else {"context_fn": _contexts}
        for block in find_blocks(model):
            forward = partial(checkpoint, block.module.forward, use_reentrant=False, **contexts)
            vars(block.module)["forward"] = forward
    return model


def _contexts() -> Any:
    """Make torch's selective contexts: attention and collectives are saved, and every second product of a block.

    Products are matrix products and convolutions. Grouped products of experts are not saved: they are not in torch's
    own list of what is worth saving. Forward and recomputation are counted separately, since their number may be odd.
    """
    counts = {False: 0, True: 0}

    def policy(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        packet, overload = str(func.overloadpacket), func._overloadname
        save = any(ops.matches(group, packet, overload) for group in ("attention", "collective"))
        if any(ops.matches(group, packet, overload) for group in ("matmul", "convolution")):
            counts[context.is_recompute] += 1
            save = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# ---------------------------------------------------------------- fast


def _fast(outcome: Outcome, large: Large) -> None:
    """Plan for one large model in its own process."""
    name, figures = f"{large.name}, {large.shard} ranks, {ROOFLINE} by roofline", _planned(large)
    outcome.measured[name] = figures
    solver, total = (3, 20) if large.sparse else (1, 10)
    outcome.bounds += [
        Bound(f"{name}: seconds of profile and fit", figures["total_s"], total, exact=False),
        Bound(f"{name}: seconds of the solver", figures["solver_s"], solver, exact=False),
        Bound(f"{name}: memory of the process, GiB", figures["process_bytes"] / 2**30, 2, exact=False),
        Bound(f"{name}: gap", figures["gap"], GAP_LIMIT[large.sparse], exact=False),
    ]


def _hard(outcome: Outcome, large: Large, limit: float) -> None:
    """Plan at the smallest peak of one large model, in its own process."""
    name, figures = f"{large.name}, {large.sequence} tokens, {large.shard} ranks, at the smallest peak", _planned(large)
    outcome.measured[name] = figures
    ratio = figures["solver_processor_s"] / figures["profile_processor_s"]
    outcome.bounds += [
        Bound(f"{name}: seconds of the solver / of the profile", ratio, limit, exact=False),
        Bound(f"{name}: gap", figures["gap"], LEAST_GAP_LIMIT[large.sparse], exact=False),
    ]


def _layers(outcome: Outcome, pair: Sequence[Large]) -> None:
    """Compare the processor's seconds for few and for many layers of one kind: other processes do not change them."""
    few, many = pair
    best = [inf, inf]
    for _ in range(NUM_ATTEMPTS):
        best = [min(seconds, _planned(each)["processor_s"]) for seconds, each in zip(best, pair, strict=True)]
    outcome.measured[f"{many.name}, the best of {NUM_ATTEMPTS}"] = {
        f"layers_{few.num_layers}_s": best[0],
        "all_layers_s": best[1],
    }
    outcome.bounds.append(
        Bound(f"{many.name}: seconds for all layers / for {few.num_layers}", best[1] / best[0], 1.25, exact=False)
    )


def _planned(large: Large) -> dict[str, Any]:
    asked = json.dumps(dataclasses.asdict(large))
    command = [sys.executable, "-m", "benchmarks.plan", asked]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"planning {large.name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def planned(large: Large) -> dict[str, Any]:
    """Plan for a large model, at the smallest peak or midway between it and that of saving everything, and time it."""
    from actmem.catalogue import build, example

    model = build(large.name, layers=large.num_layers)
    batch = example(large.name, sequence=large.sequence)
    started, worked = perf_counter(), process_time()
    profile = actmem.profile(model, batch, shard=large.shard)
    profiled, worked = perf_counter(), process_time() - worked
    least = smallest_peak(profile)[0]
    most = least if large.at_least else actmem.predict(profile, actmem.SaveEverything(), DEVICE).peak_bytes
    budget = (least + most) // 2
    solutions: list[Solution] = []
    solving: list[float] = []
    really_solve = profile_fit.solve

    def listened(*args: Any, **kwargs: Any) -> Solution:
        asked = process_time()
        solutions.append(really_solve(*args, **kwargs))
        solving.append(process_time() - asked)
        return solutions[-1]

    with patch.object(profile_fit, "solve", listened):
        begun, planning = perf_counter(), process_time()
        plan = profile_fit.fit_profile([profile], budget, DEVICE)
        done, planning = perf_counter(), process_time() - planning
    assert plan.predicted is not None
    return {
        "layers": len(plan.blocks),
        "budget_gib": budget / 2**30,
        "profile_s": profiled - started,
        "solver_s": solutions[-1].solver_seconds,
        "total_s": profiled - started + done - begun,
        "processor_s": worked + planning,
        "profile_processor_s": worked,
        "solver_processor_s": sum(solving),
        "predicted_time": plan.predicted.step_time_ratio,
        "gap": plan.predicted.gap,
        "process_bytes": most_resident_bytes(),
    }


if __name__ == "__main__":
    print(json.dumps(planned(Large(**json.loads(sys.argv[1])))))
