"""What the bookkeeping costs: steps in which arithmetic takes no time to speak of, and one in which it does.

A tiny Llama and a tiny Mixtral have tensors so small that only bookkeeping takes time. LoRA on a small Llama is a
realistic step of many small operators. All variants of a model run in turn in one process and on one thread, in an
order that reverses each time, with the garbage collector off. A ratio is the median over pairs of neighbouring steps.
Seconds are those of the processor in this thread, which runs both passes: other programs on the machine count less.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from functools import partial
from math import inf
from statistics import median
from time import thread_time
from typing import NamedTuple

import torch
from torch import Tensor, nn

import actmem
from actmem.cli.demo import Size
from actmem.native import build as build_core
from benchmarks.hugging_models import LoraSize, checkpoint_as_people_do, lora, mixtral, mixtral_tokens
from benchmarks.models import SELECTIVE, llama
from benchmarks.outcome import Bound, Outcome
from benchmarks.tape_bytes import tape_bytes

TINY = Size(dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn=64, vocab=64, batch=1, length=8)
TRAINING = ("plain", "torch full", "torch selective", "actmem full", "actmem selective", "actmem save everything")
HUGGING_FACE, FULL, BUDGET, NATIVE = "Hugging Face", "actmem full", "actmem budget", "actmem full, native tape"
"""The first is the gradient checkpointing of transformers."""
NOTHING_LIMIT = 1.02
NUM_BLOCKS = 126
"""Of the Llama whose tapes are weighed."""
NUM_ATTEMPTS = 3
NUM_WARM_UP = 5
CONTROL = "a second plain model"
"""Identical to plain: how far its ratios lie from 1 is the noise of this machine."""

Step = Callable[[], float]


class Ratio(NamedTuple):
    """A form's time compared with another's. `aim` is what the limit is to become, where that is not reached yet."""

    ours: str
    theirs: str
    limit: float
    aim: float | None = None


LLAMA_RATIOS = (Ratio(FULL, "torch full", 1.45, 1.00), Ratio("actmem selective", "torch selective", 0.70, 0.50))
MIXTRAL_RATIOS = (Ratio(FULL, "torch full", 1.45, 1.00), Ratio("actmem selective", "torch selective", 0.75, 0.50))
NATIVE_RATIOS = (Ratio(FULL, "torch full", 0.70, 0.65), Ratio("actmem selective", "torch selective", 0.36, 0.33))
LORA_RATIOS = (Ratio(FULL, HUGGING_FACE, 1.15, 1.00), Ratio(BUDGET, HUGGING_FACE, 1.00))
TAPE_LIMIT, TAPE_AIM = 1050, 400
"""Bytes of Python objects for each value that is replayed."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to time."""

    name: str
    build: Callable[[str], nn.Module]
    """Makes it in train mode, under one of the forms."""
    loss: Callable[[nn.Module], Tensor]

    def step(self, model: nn.Module) -> None:
        """Run forward and backward, from no gradients."""
        model.zero_grad()
        self.loss(model).backward()

    def timed(self, model: nn.Module) -> Step:
        """Return a function that times one forward and backward."""

        def step() -> float:
            model.zero_grad()
            started = thread_time()
            self.loss(model).backward()
            return thread_time() - started

        return step

    def timed_inference(self, model: nn.Module) -> Step:
        """Return a function that times one forward without gradients."""

        def step() -> float:
            with torch.no_grad():
                started = thread_time()
                self.loss(model)
                return thread_time() - started

        return step


def run(
    size: Size = TINY,
    *,
    lora_size: LoraSize | None = None,
    num_repetitions: int = 100,
    num_close_repetitions: int = 300,
    num_lora_repetitions: int = 25,
    num_blocks: int = NUM_BLOCKS,
) -> Outcome:
    """Time everything, count operators, weigh tapes, and compare with the bounds.

    If a ratio is above its bound, all of that model are measured again, up to `NUM_ATTEMPTS` times; the attempt counts
    that is best compared with its bounds, and all are listed.
    """
    lora_size = lora_size or LoraSize()
    settings = {**dataclasses.asdict(size), "num_repetitions": num_repetitions, "num_attempts": NUM_ATTEMPTS}
    settings |= {f"lora_{name}": value for name, value in dataclasses.asdict(lora_size).items()}
    repetitions = {"num_close_repetitions": num_close_repetitions, "num_lora_repetitions": num_lora_repetitions}
    outcome = Outcome("overhead", {**settings, **repetitions, "clock": "thread_time", "num_blocks": num_blocks})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case, ratios in zip(tiny_cases(size), (LLAMA_RATIOS, MIXTRAL_RATIOS), strict=True):
            count_operators(outcome, case)
            models = {form: case.build(form) for form in TRAINING}
            _time_forms(outcome, case, models, ratios, num_repetitions)
            _time_nothing(outcome, case, num_close_repetitions)
        _time_native(outcome, size, num_repetitions)
        _time_lora(outcome, lora_size, num_lora_repetitions)
    finally:
        torch.set_num_threads(threads)
    weigh_tapes(outcome, dataclasses.replace(size, num_layers=num_blocks))
    return outcome


def tiny_cases(size: Size) -> tuple[Case, Case]:
    """Return the two models whose tensors are tiny. The Mixtral is that of transformers."""
    tokens, batch = size.tokens(), mixtral_tokens()
    return (
        Case("Llama", partial(llama, size), lambda model: model(*tokens)),
        Case("Mixtral", partial(mixtral, size.num_layers), lambda model: model(**batch).loss),
    )


def count_operators(outcome: Outcome, case: Case) -> None:
    """Count the operators of one step under each form."""
    for form in TRAINING:
        model = case.build(form)
        for _ in range(2):
            case.step(model)
        m = actmem.measure(lambda model=model: case.step(model))
        outcome.exact[f"{case.name}, {form}"] = {"operators": m.num_ops, "replayed_operators": m.num_replayed_ops}
    for kind in ("full", "selective"):
        ours, theirs = (outcome.exact[f"{case.name}, {w} {kind}"]["replayed_operators"] for w in ("actmem", "torch"))
        outcome.bounds.append(Bound(f"{case.name}, actmem {kind}: replayed operators / torch's", ours / theirs, 1.0))


def weigh_tapes(outcome: Outcome, size: Size) -> None:
    """Note the bytes of a tape's own objects: their counts are exact, bytes depend on the version of Python."""
    found = tape_bytes(size)
    name = f"tapes of {size.num_layers} blocks"
    outcome.exact[name] = {"saved_tensors": found.num_handles, "replayed_values": found.num_replayed}
    for kind, num_bytes in {"all objects": found.total_bytes, **found.by_kind}.items():
        each = round(num_bytes / found.num_replayed)
        outcome.measured[f"{name}: {kind}"] = {"python_bytes": num_bytes, "for each replayed value": f"{each} B"}
    each = found.total_bytes / found.num_replayed
    promise = f"{name}: bytes of Python objects for each replayed value"
    outcome.bounds.append(Bound(promise, each, TAPE_LIMIT, exact=False, aim=TAPE_AIM))


def _time_lora(outcome: Outcome, size: LoraSize, num_repetitions: int) -> None:
    """Time LoRA under full recomputation and under a budget halfway between it and plain training."""
    batch = size.tokens()
    case = Case("LoRA", lambda _: lora(size), lambda model: model(**batch).loss)
    models: dict[str, nn.Module] = {form: case.build(form) for form in ("plain", HUGGING_FACE, FULL, BUDGET)}
    checkpoint_as_people_do(models[HUGGING_FACE])
    actmem.apply(models[FULL], actmem.Full())
    peaks: dict[str, int] = {}
    for form in ("plain", HUGGING_FACE, FULL):
        peaks[form], num_replayed = _measured(case, models[form])
        outcome.exact[f"LoRA, {form}"] = {"peak_bytes": peaks[form], "replayed_operators": num_replayed}
    budget = (peaks["plain"] + peaks[FULL]) // 2
    actmem.apply(models[BUDGET], actmem.Budget(budget, optimizer=None), example=batch)
    peak, num_replayed = _measured(case, models[BUDGET])
    # What a plan replays follows from what this machine takes for each operator.
    plan = {"budget_bytes": budget, "peak_bytes": peak, "replayed_operators": num_replayed}
    outcome.measured[f"LoRA, the plan of {BUDGET}"] = plan
    outcome.bounds.append(Bound(f"LoRA, {BUDGET}: peak / budget", peak / budget, 1.0))
    outcome.bounds.append(Bound(f"LoRA, {FULL}: peak / Hugging Face's", peaks[FULL] / peaks[HUGGING_FACE], 1.0))
    ratios = LORA_RATIOS
    if _has_core(outcome):
        models[NATIVE] = case.build("plain")
        actmem.apply(models[NATIVE], actmem.Full(), native=True)
        ratios = (*LORA_RATIOS, Ratio(NATIVE, HUGGING_FACE, 1.00))
    _time_forms(outcome, case, models, ratios, num_repetitions)


def _measured(case: Case, model: nn.Module) -> tuple[int, int]:
    """Return the peak and the replayed operators of a third step: the first is observed, the second knows the rest."""
    for _ in range(2):
        case.step(model)
    m = actmem.measure(lambda: case.step(model), model=model)
    return m.peak_bytes, m.num_replayed_ops


def _time_forms(
    outcome: Outcome, case: Case, models: dict[str, nn.Module], ratios: tuple[Ratio, ...], num_repetitions: int
) -> None:
    steps = {form: case.timed(model) for form, model in models.items()}
    best, kept = inf, list[float]()
    tried: list[list[float]] = [[] for _ in ratios]
    for _ in range(NUM_ATTEMPTS):
        seconds = _interleaved(steps, num_repetitions)
        found = [_ratio(seconds[r.ours], seconds[r.theirs]) for r in ratios]
        for each, ratio in zip(tried, found, strict=True):
            each.append(ratio)
        worst = max(ratio / r.limit for ratio, r in zip(found, ratios, strict=True))
        if worst < best:
            best, kept = worst, found
            for form in models:
                compared = dict.fromkeys(["plain", *(r.theirs for r in ratios)])
                outcome.measured[f"{case.name}, {form}"] = {
                    "step_seconds": median(seconds[form]),
                    **{f"to_{theirs}": _ratio(seconds[form], seconds[theirs]) for theirs in compared},
                }
        if best <= 1:
            break
    for r, ratio, every in zip(ratios, kept, tried, strict=True):
        outcome.measured[f"{case.name}, {r.ours}, every attempt"] = {"time / theirs": _listed(every)}
        name = f"{case.name}, {r.ours}: time / {r.theirs}"
        outcome.bounds.append(Bound(name, ratio, r.limit, exact=False, aim=r.aim))


def _time_nothing(outcome: Outcome, case: Case, num_repetitions: int) -> None:
    """Time what must cost nothing: saving everything, eval mode, and eval mode without gradients.

    Two equal models differ by up to 2 % for as long as they live, by where they lie in memory. So each attempt has
    models of its own.
    """
    pairs: dict[str, tuple[str, bool, Callable[[nn.Module], Step]]] = {
        CONTROL: ("plain", True, case.timed),
        "actmem save everything": ("actmem save everything", True, case.timed),
        "actmem eval": ("actmem selective", False, case.timed),
        "actmem eval, no_grad": ("actmem selective", False, case.timed_inference),
    }
    for name, (form, training, timed) in pairs.items():
        best, tried = inf, list[float]()
        for _ in range(NUM_ATTEMPTS):
            ours, theirs = (case.build(each).train(training) for each in (form, "plain"))
            seconds = _interleaved({"ours": timed(ours), "plain": timed(theirs)}, num_repetitions)
            ratio = _ratio(seconds["ours"], seconds["plain"])
            tried.append(ratio)
            if ratio < best:
                best = ratio
                outcome.measured[f"{case.name}, {name}, alone with plain"] = {
                    "step_seconds": median(seconds["ours"]),
                    "plain_seconds": median(seconds["plain"]),
                    "to_plain": ratio,
                }
            if best <= NOTHING_LIMIT and name != CONTROL:
                break
        outcome.measured[f"{case.name}, {name}, alone with plain"]["tried"] = _listed(tried)
        if name != CONTROL:
            outcome.bounds.append(Bound(f"{case.name}, {name}: time / plain", best, NOTHING_LIMIT, exact=False))


def _time_native(outcome: Outcome, size: Size, num_repetitions: int) -> None:
    """Time the native tape against torch's forms, where its core can be compiled."""
    if not _has_core(outcome):
        return
    tokens = size.tokens()
    case = Case("Llama, native tape", partial(llama, size), lambda model: model(*tokens))
    models: dict[str, nn.Module] = {form: case.build(form) for form in ("plain", "torch full", "torch selective")}
    for form, mode in ((FULL, actmem.Full()), ("actmem selective", SELECTIVE)):
        models[form] = case.build("plain")
        actmem.apply(models[form], mode, native=True)
    _time_forms(outcome, case, models, NATIVE_RATIOS, num_repetitions)


def _has_core(outcome: Outcome) -> bool:
    """Return whether the native core is built, after trying to; note the reason if not."""
    try:
        build_core()
    except actmem.UnsupportedError as why:
        outcome.measured["native tape"] = {"skipped": str(why).split(". ", 1)[0]}
        return False
    return True


def _interleaved(steps: dict[str, Step], num_repetitions: int) -> dict[str, list[float]]:
    """Run all steps in turn, every other time backwards. The i-th times of two steps belong together."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(NUM_WARM_UP):
        for step in steps.values():
            step()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for index in range(num_repetitions):
            for name in steps if index % 2 else reversed(steps):
                seconds[name].append(steps[name]())
    finally:
        if collecting:
            gc.enable()
    return seconds


def _listed(ratios: list[float]) -> str:
    return ", ".join(f"{ratio:.3f}" for ratio in ratios)


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))
