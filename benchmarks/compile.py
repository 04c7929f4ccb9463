"""Peak and saved bytes of compiled and eager blocks: none, full, selective on the block, selective on its parts.

Bytes come from the allocator's events in torch's profiler, the one instrument that sees into inductor's graphs too.
For eager code and for `aot_eager` it agrees with `actmem.measure`; a test says so. Each figure is of a step that adds
to existing gradients, so that activations alone decide. None depends on the machine's speed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import actmem
from actmem.compat.torchtitan import CompilerBudget
from actmem.planner import compilation, fit_ladder, make_ladder
from actmem.simulation import resolved
from actmem.structure import find_blocks
from benchmarks.outcome import RESULTS, Bound, Outcome
from benchmarks.table import replaced, rows
from tests.compile import part_peaks
from tests.zoo_titan import MoE, TitanLike


@dataclasses.dataclass(frozen=True)
class Shape:
    """The size of a model and of its batch."""

    dim: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 2
    ffn: int = 704
    vocab: int = 256
    batch: int = 2
    length: int = 256

    def tokens(self) -> Tensor:
        """Draw a batch."""
        return torch.randint(self.vocab, (self.batch, self.length), generator=torch.Generator().manual_seed(1))


PAGE = Path(__file__).parent.parent / "docs" / "compile.md"
BEGIN = "<!-- tables: written by `python -m benchmarks.compile`, from here -->"
END = "<!-- tables: to here -->"
LARGE = Shape()
BACKENDS = ("eager", "aot_eager", "inductor")
SAVE = ["attention", "grouped_matmul", actmem.every_second("matmul")]
KINDS = ("dense", "moe", "moe that breaks the graph")
"""Kinds of layers. Of the sparse models the first layer is dense."""
FORMS: dict[str, Callable[[str], tuple[Any, str | None]]] = {
    "none": lambda _: (None, None),
    "full": lambda _: (actmem.Full(), None),
    "selective, block": lambda kind: (_selective(kind), None),
    "selective, parts": lambda kind: (
        _selective(kind),
        "layers.*.attention,layers.*.feed_forward" + ("" if kind == "dense" else ",layers.*.moe"),
    ),
}
"""Form -> mode and blocks. The parts are attention and feed-forward, applied separately; the norms stay outside."""
BUDGETS = (0.0, 0.1, 0.25, 0.3, 0.5, 0.75, 1.0)
MARK = "backward begins"
FITTED = "a plan fitted to its peak"
PARTS = {"dense": "sized_dense", "moe": "sized_moe"}
"""Kind of layers -> the model whose attention, norms and feed-forward are compiled inside eager blocks."""


def run(
    shape: Shape = LARGE,
    *,
    backends: Sequence[str] = BACKENDS,
    budgets: Sequence[float] = BUDGETS,
    parts: Mapping[str, str] = PARTS,
) -> Outcome:
    """Measure everything, and compare it with the bounds."""
    outcome = Outcome("compile", {"shape": dataclasses.asdict(shape), "backends": list(backends)})
    with quiet():
        for kind, backend in itertools.product(KINDS, backends):
            if kind in KINDS[:2] or backend != "eager":  # in eager there is no graph to break
                _blocks(outcome, shape, kind, backend)
        _budgets(outcome, shape, budgets)
        _against(outcome, shape, budgets)
    for kind, backend in itertools.product(parts, backends):
        if backend != "eager":
            _parts(outcome, kind, parts[kind], backend)
    return outcome


def _selective(kind: str) -> actmem.Selective:
    return actmem.Selective(save=[s for s in SAVE if s != "grouped_matmul" or kind != "dense"])


def _blocks(outcome: Outcome, shape: Shape, kind: str, backend: str) -> None:
    found: dict[str, dict[str, Any]] = {}
    for form, make in FORMS.items():
        mode, blocks = make(kind)
        found[form] = figures(shape, kind, backend, mode, blocks)
        outcome.exact[f"{kind}, {backend}, {form}"] = found[form]
    who = f"{kind}, {backend}"
    for form in FORMS:
        if form != "none":
            value = found[form]["peak_bytes"] / found["none"]["peak_bytes"]
            outcome.bounds.append(Bound(f"{who}: peak of {form} / none", value, 1.0))
    value = found["selective, block"]["saved_bytes"] / found["selective, parts"]["saved_bytes"]
    outcome.bounds.append(Bound(f"{who}: saved by selective on the block / on its parts", value, 1.0))


def _parts(outcome: Outcome, kind: str, name: str, backend: str) -> None:
    """Measure compiled parts of eager blocks, next to torch's checkpoint on the same parts. See `part_peaks.py`."""
    found = part_peaks.peaks(name, backend)
    for form in part_peaks.FORMS:
        row = {figure: found[form][figure] for figure in ("peak_bytes", "saved_bytes")}
        outcome.exact[f"compiled parts, {kind}, {backend}, {form}"] = row
    for ours, theirs, limit in (("full", "torch's checkpoint", 1.02), ("selective", "torch's selective", 1.0)):
        value = found[ours]["peak_bytes"] / found[theirs]["peak_bytes"]
        outcome.bounds.append(Bound(f"compiled parts, {kind}, {backend}: peak of {ours} / {theirs}", value, limit))
        differs = float(found[ours]["digest"] != found["plain"]["digest"])
        outcome.bounds.append(Bound(f"compiled parts, {kind}, {backend}: gradients of {ours} differ", differs, 0.0))


def figures(
    shape: Shape,
    kind: str,
    backend: str,
    mode: Any,
    blocks: str | None,
    *,
    whole: bool = False,
    counted: bool = False,
) -> dict[str, Any]:
    """Measure one variant, compiled layer by layer, or whole; with the FLOPs of the step, if they are to be counted."""
    torch._dynamo.reset()
    model = build(shape, kind)
    if isinstance(mode, CompilerBudget):
        applied = mode.apply(model)
    else:
        applied = None if mode is None else actmem.apply(model, mode, blocks=blocks)
    call: Any = model
    if backend != "eager" and whole:
        call = torch.compile(model, backend=backend)
    elif backend != "eager":
        for layer in model.layers.values():
            layer.compile(backend=backend)
    ids = shape.tokens()

    def step() -> None:
        loss = call(ids, ids)
        with record_function(MARK):
            pass
        loss.backward()

    for _ in range(2):  # the first is observed, and creates the gradients; from the second on the tape knows its cut
        step()
    peak_bytes, saved_bytes = allocated(step)
    measured = {"peak_bytes": peak_bytes, "saved_bytes": saved_bytes}
    if counted:
        seen = actmem.measure(step, model=model)
        measured["flops"] = seen.forward_flops + seen.backward_flops + seen.replayed_flops
    if applied is not None:
        applied.remove()
    if not isinstance(applied, actmem.Applied):
        return {**measured, "taken_in": "" if backend == "eager" else "all"}
    report = applied.report()
    compiled = {path for graph in report.compiled for path in (*graph.blocks, *graph.shared_with)}
    compiled -= {path for kind_report in report.kinds for path in kind_report.paths}  # given up since
    taken_in = f"{len(compiled)} of {len(applied.plan.blocks)}" if backend != "eager" else ""
    return {**measured, "taken_in": taken_in}


def allocated(step: Callable[[], None]) -> tuple[int, int]:
    """Run a step; return its peak bytes, and its bytes when the backward pass began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        step()
    events: Any = seen.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    live = peak = saved = 0
    for event in sorted((e for e in events if e.name() in ("[memory]", MARK)), key=lambda e: e.start_ns()):
        if event.name() == MARK:
            saved = live
        else:
            live += event.nbytes()
            peak = max(peak, live)
    return peak, saved


def _budgets(outcome: Outcome, shape: Shape, budgets: Sequence[float]) -> None:
    """Measure the compiler's own budget on the whole dense model, next to actmem's modes on the same graph."""
    import torch._functorch.config as functorch_config

    peaks: list[int] = []
    with functorch_config.patch(enable_autograd_cache=False):  # its key does not include the budget's solver
        for fraction in budgets:
            found = figures(shape, "dense", "aot_eager", CompilerBudget(fraction), None, whole=True)
            peaks.append(found["peak_bytes"])
            row = {"peak_bytes": found["peak_bytes"], "saved_bytes": found["saved_bytes"]}
            outcome.exact[f"whole dense model, aot_eager, CompilerBudget({fraction})"] = row
        for form in ("full", "selective, block"):
            mode, _ = FORMS[form]("dense")
            found = figures(shape, "dense", "aot_eager", mode, None, whole=True)
            row = {"peak_bytes": found["peak_bytes"], "saved_bytes": found["saved_bytes"]}
            outcome.exact[f"whole dense model, aot_eager, actmem {form}"] = row
    rises = sum(less > more for less, more in itertools.pairwise(peaks))
    outcome.exact["whole dense model, less budget and a higher peak"] = {"steps": rises, "of": len(budgets) - 1}


def _against(outcome: Outcome, shape: Shape, budgets: Sequence[float]) -> None:
    """Fit a plan to the peak of each budget of the compiler's, on the same blocks, each of them compiled."""
    import torch._functorch.config as functorch_config

    model, ids = build(shape, "dense"), shape.tokens()
    # The compiler's knapsack counts FLOPs. So does a device that moves bytes in no time.
    known = dataclasses.replace(resolved("h100-80gb").tensors_only(), memory_bytes_per_second=1e30)
    blocks = find_blocks(model)
    # With a second microbatch the gradients exist from the start, as they do in the measured steps.
    found = actmem.profile(model, (ids, ids), optimizer=None, microbatches=2)
    how = compilation(model, blocks, actmem.Compiled(backend="aot_eager"))
    assert how is not None
    ladder = make_ladder(model, blocks, (ids, ids), None, how, found, known, fake=True)
    for fraction in budgets:
        with functorch_config.patch(enable_autograd_cache=False):
            theirs = _computed(shape, CompilerBudget(fraction))
        plan = fit_ladder(ladder, found.base_bytes + theirs["peak_bytes"], known, how, fake=False)
        ours = _computed(shape, plan)
        who = f"dense blocks, aot_eager, CompilerBudget({fraction})"
        outcome.exact[who] = theirs
        outcome.exact[f"{who}: {FITTED}"] = ours
        for name in ("peak_bytes", "flops"):
            outcome.bounds.append(Bound(f"{who}: {name} of a plan / its own", ours[name] / theirs[name], 1.0))


def _computed(shape: Shape, mode: Any) -> dict[str, Any]:
    """Measure peak and FLOPs of a step, compiled layer by layer."""
    found = figures(shape, "dense", "aot_eager", mode, None, counted=True)
    return {name: found[name] for name in ("peak_bytes", "saved_bytes", "flops")}


# ---------------------------------------------------------------- models


class CountedMoE(MoE):
    """The zoo's MoE, which counts the tokens of an expert by `histc`, so that a graph can include it."""

    def forward(self, x: Tensor) -> Tensor:
        """Sort the tokens by expert, run the experts on them, and restore the order."""
        flat = x.flatten(0, -2)
        scores, chosen = self.router(flat)
        num_experts = self.router.gate.out_features
        order = torch.argsort(chosen.flatten(), stable=True)
        num_tokens = torch.histc(chosen.flatten().float(), bins=num_experts, min=0, max=num_experts - 1)
        token = order // self.router.top_k
        routed = self.experts(flat[token], num_tokens) * scores.flatten()[order, None].type_as(flat)
        out = self.shared_experts(flat)
        return out.index_add(0, token, routed.to(out.dtype)).reshape(x.shape)


def build(shape: Shape, kind: str) -> TitanLike:
    """Build a model. The zoo's MoE counts tokens by `bincount`, whose size a graph does not know: it breaks there."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TitanLike(
            dim=shape.dim,
            layers=shape.num_layers,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            ffn=shape.ffn if kind == "dense" else shape.ffn // 2,
            vocab=shape.vocab,
            max_length=shape.length,
            sparse=kind != "dense",
        )
    for block in find_blocks(model):
        experts: nn.Module | None = getattr(block.module, "moe", None)
        if experts is not None and kind == "moe":
            experts.__class__ = CountedMoE
    return model.train()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the compiler's own warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        torch._dynamo.reset()


# ---------------------------------------------------------------- the page


def update(results: Path = RESULTS, page: Path = PAGE) -> None:
    """Write the tables of docs/compile.md from the results."""
    result = json.loads((results / "compile.json").read_text())
    page.write_text(replaced(page.read_text(), BEGIN, END, "\n".join(_tables(result))))


def _tables(result: dict[str, Any]) -> Iterator[str]:
    shape, env, exact = result["settings"]["shape"], result["environment"], result["exact"]
    yield (
        f"Width {shape['dim']}, {shape['num_layers']} layers, {shape['batch']} sequences of {shape['length']} tokens, "
        f"fp32, torch {env['torch']} on a CPU. Peak / saved, in MiB."
    )
    yield ""
    body: list[list[str]] = []
    for kind, backend in itertools.product(KINDS, result["settings"]["backends"]):
        found = {form: exact.get(f"{kind}, {backend}, {form}") for form in FORMS}
        if found["none"] is None:
            continue
        taken_in = found["selective, block"]["taken_in"], found["selective, parts"]["taken_in"]
        where = "the tape" if backend == "eager" else f"{taken_in[0]}; {taken_in[1]}"
        body.append([f"{kind}, {backend}", *(_pair(found[form]) for form in FORMS), where])
    yield from rows(["layers, backend", *FORMS, "blocks in graphs; parts in graphs"], body)
    inside = [name.removesuffix(", plain") for name in exact if name.startswith("compiled parts") and "plain" in name]
    if inside:
        yield "Blocks in eager, with attention, norms and feed-forward compiled by themselves:"
        yield ""
        body = [
            [name.removeprefix("compiled parts, "), *(_pair(exact[f"{name}, {form}"]) for form in part_peaks.FORMS)]
            for name in inside
        ]
        yield from rows(["layers, backend", *part_peaks.FORMS], body)
    yield "The compiler's own budget, on the whole dense model, with `aot_eager`:"
    yield ""
    whole = {name: f for name, f in exact.items() if name.startswith("whole") and "peak_bytes" in f}
    names = [name.removeprefix("whole dense model, aot_eager, ") for name in whole]
    yield from rows(["mode", "peak / saved"], [[n, _pair(f)] for n, f in zip(names, whole.values(), strict=True)])
    against = [name for name in exact if f"{name}: {FITTED}" in exact]
    if against:
        yield f"And on its blocks, each of them compiled: {FITTED}, where FLOPs are all that counts."
        yield ""
        body = [
            [name.rpartition(", ")[2], *(_and_flops(exact[n]) for n in (name, f"{name}: {FITTED}"))] for name in against
        ]
        yield from rows(["mode", "peak / saved, GFLOP", FITTED], body)


def _and_flops(found: dict[str, Any]) -> str:
    return f"{_pair(found)}, {found['flops'] / 1e9:.3f}"


def _pair(found: dict[str, Any]) -> str:
    return f"{found['peak_bytes'] / 2**20:.2f} / {found['saved_bytes'] / 2**20:.2f}"


if __name__ == "__main__":
    update()
