"""Checks of a model's structure: parts that running forward a second time is known to disturb."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage] # it has no public name

from actmem.diagnosis.findings import Finding, Severity, paths
from actmem.diagnosis.regions import Case
from actmem.errors import StructureError
from actmem.modes import Mode
from actmem.plan import Plan
from actmem.structure import Block, find_blocks, find_roles
from actmem.torchcompat import named_modules

__all__ = [
    "autocast_shared",
    "batch_norm",
    "cache_on",
    "graph_kept",
    "packets",
    "random_numbers",
    "renamed",
    "routing",
    "shared_keys_values",
    "towers",
]

_RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RATES = ("attention_dropout", "attn_dropout", "dropout", "dropout_p", "dropout_prob", "hidden_dropout", "drop_path")
_FULL = "actmem.apply(model, actmem.Full())"


def random_numbers(case: Case) -> Iterator[Finding]:
    """Look for random numbers in blocks that are recomputed without restoring the generator state."""
    off = case.setup.preserve_rng_state is False
    regions = [r for r in case.regions if r.options.get("preserve_rng_state") is False]
    if not off and not regions:
        return
    found = [f"{b.path}.{p}".strip(".") for b in case.blocks for p, m in named_modules(b.module) if _rate_of(m) > 0]
    if found:
        where = case.setup.checkpointing if off else f"{regions[0].by} at {regions[0].path}"
        yield Finding(
            check="random-numbers",
            severity="problem",
            found=f"preserve_rng_state = False ({where}), and dropout at {paths(found)}",
            why="Recomputation draws other random numbers than forward did: gradients are wrong, without an error.",
            change="preserve_rng_state=True.",
            actmem=f"Every random operator is replayed with its original generator state: {_FULL}",
        )


def batch_norm(case: Case) -> Iterator[Finding]:
    """Look for batch norm, whose running statistics a second forward would update again."""
    found = [
        f"{b.path}.{p}".strip(".")
        for b in case.blocks
        for p, m in named_modules(b.module)
        if isinstance(m, _BatchNorm) and m.track_running_stats and m.training
    ]
    if found:
        yield Finding(
            check="batch-norm",
            severity=_severity(case),
            found=f"batch norm in the blocks, at {paths(found)}{_with(case)}",
            why="Run twice in a step, it updates its running statistics twice: the training loss does not show it, "
            "evaluation does.",
            change="Exclude these blocks from torch's checkpointing, or use group norm.",
            actmem=f"Replayed without updating the statistics: {_FULL}",
        )


def shared_keys_values(case: Case) -> Iterator[Finding]:
    """Look for layers that reuse keys and values of earlier layers."""
    for where, value in case.config("num_kv_shared_layers"):
        if isinstance(value, int) and value > 0:
            yield Finding(
                check="shared-keys-values",
                severity=_severity(case),
                found=f"{where} = {value}{_with(case)}",
                why="The last layers read keys and values of earlier ones from the cache. Checkpointing that turns the "
                "cache off gives them untrained ones, without an error; with the cache on, it grows twice.",
                change="Do not checkpoint these layers with torch, and leave use_cache on.",
                actmem=f"Forward runs once, so shared keys and values are correct: {_FULL}",
            )


def routing(case: Case) -> Iterator[Finding]:
    """Look for routers whose choices are not saved."""
    roles = find_roles(case.the_model, case.blocks)
    found = [f"{b.path}.{p}" for b, its in zip(case.blocks, roles, strict=True) for p in its.get("router", ())]
    if not found or any("topk" in str(op) for op in case.policy):
        return
    kept = "a policy that does not save top-k" if case.policy else "no routing results saved"
    yield Finding(
        check="routing",
        severity="warning" if case.checkpointing else "note",
        found=f"routed experts ({paths(found)}){_with(case)}{f', {kept}' if case.checkpointing else ''}",
        why="Run twice, a router may send a token to another expert (a tie in top-k is enough): shapes differ, or "
        "gradients go to the wrong expert.",
        change="Save the router's product, its top-k and the dispatch layout in the policy.",
        actmem=f"Routing decisions are never computed again, in any mode: {_FULL}",
    )


def packets(case: Case) -> Iterator[Finding]:
    """Look for policies that list an operator without its overload."""
    listed = [*case.policy, *(op for r in case.regions for op in _in_context(r.options.get("context_fn")))]
    bare = [str(op) for op in listed if type(op).__name__ == "OpOverloadPacket"]
    if bare:
        yield Finding(
            check="packets",
            severity="problem",
            found=f"{', '.join(dict.fromkeys(bare))} without an overload in the policy",
            why="A policy is asked about overloads, such as aten.mm.default. A packet does not equal any of them, so "
            "nothing is saved, without an error.",
            change=f"torch.ops.{bare[0]}.default",
            actmem="actmem.Selective(save=['aten.mm']) covers all overloads, and a name that matches nothing raises "
            "an error.",
        )


def autocast_shared(case: Case) -> Iterator[Finding]:
    """Look for a weight that two blocks share under autocast."""
    autocast = case.setup.autocast or ("autocast is on here" if torch.is_autocast_enabled() else None)
    if autocast is None:
        return
    owners: dict[int, list[str]] = {}
    for block in case.blocks:
        for name, parameter in block.module.named_parameters():
            owners.setdefault(id(parameter), []).append(f"{block.path}.{name}")
    shared = [names for names in owners.values() if len(names) > 1]
    if shared:
        yield Finding(
            check="autocast-shared",
            severity=_severity(case),
            found=f"{paths(shared[0])} are the same weight, under autocast ({autocast}){_with(case)}",
            why="Autocast casts it once and caches the result, so only one of the blocks performs the cast. A "
            "recomputed block saves other tensors than forward did, or asks for a cast that was not stored.",
            change="Do not checkpoint blocks that share weights under autocast, or remove aten._to_copy from the "
            "policy.",
            actmem=f"A cast is recorded where it ran: {_FULL}",
        )


def towers(case: Case) -> Iterator[Finding]:
    """Look for towers that are frozen but checkpointed, or trained but not covered by the mode."""
    language = _tower(case, "language")
    for tower in ("vision", "audio"):
        blocks = _tower(case, tower)
        if not blocks or not language:
            continue
        root = _common(blocks)
        inside = [p for _, p in case.the_model.get_submodule(root).named_parameters()]
        where = f"the {tower} tower at {root or 'the model itself'} ({len(blocks)} blocks)"
        treated = [r for r in case.regions if r.path == root or r.path.startswith(f"{root}.")]
        if not any(p.requires_grad for p in inside):
            yield Finding(
                check="towers",
                severity="warning" if treated else "note",
                found=f"{where} is frozen{f', and checkpointed by {treated[0].by}' if treated else ''}",
                why="No gradient flows through it, so none of its activations are held: recomputing it saves nothing, "
                "and the reentrant form warns or raises.",
                change="Exclude it from checkpointing.",
                actmem="By default only the language model is treated; blocks without gradients are left alone anyway.",
            )
        elif case.mode is not None and not _covers(case.mode, root):
            frozen = not any(p.requires_grad for b in blocks for p in b.module.parameters())
            how = "is frozen, but something upstream of it is trained" if frozen else "is trained"
            yield Finding(
                check="towers",
                severity="warning",
                found=f"{where} {how}, and the mode is {case.mode!r}",
                why="Gradients flow through it, so its activations are held, and by default a mode treats only the "
                "language model.",
                change=f"actmem.apply(model, mode, scope=['language', '{tower}'])",
                actmem="Treats the towers named in scope.",
            )


def graph_kept(case: Case) -> Iterator[Finding]:
    """Look for modules that store a tensor together with its autograd graph."""
    found = [f"{p}.{name}".strip(".") for p, m in case.modules for name in _with_graph(m)]
    if found:
        yield Finding(
            check="graph-kept",
            severity="warning",
            found=f"tensors attached to a graph are stored in {paths(found)}",
            why="A graph stays alive as long as the tensor: its memory is not freed, and the next backward through it "
            "raises “Trying to backward through the graph a second time”.",
            change=f"Detach it where it is stored: self.{found[0].rpartition('.')[2]} = value.detach()",
            actmem="actmem does not change this.",
        )


def cache_on(case: Case) -> Iterator[Finding]:
    """Look for a key-value cache that is on during training."""
    if case.setup.trainer and case.setup.use_cache is False:
        return  # transformers' Trainer writes its own setting into the configuration
    on = [where for where, value in case.config("use_cache") if value is True]
    shared = any(isinstance(v, int) and v > 0 for _, v in case.config("num_kv_shared_layers"))
    if on and not shared and case.the_model.training:
        yield Finding(
            check="cache-on",
            severity="warning" if case.checkpointing else "note",
            found=f"{on[0]} = True in training{_with(case)}",
            why="Keys and values are kept in the output for a generation that never happens; checkpointing turns the "
            "cache off for each call with a warning, or lets it grow twice; it causes a graph break in torch.compile.",
            change=f"{on[0]} = False, and True again before generate().",
            actmem="Results are correct either way; only turning the cache off saves its memory.",
        )


def renamed(case: Case) -> Iterator[Finding]:
    """Look for parameters that a wrapper has renamed."""
    names = [n for n, _ in case.the_model.named_parameters() if "_checkpoint_wrapped_module" in n]
    if names:
        yield Finding(
            check="renamed",
            severity="warning",
            found=f"{names[0]} and {len(names) - 1} more parameters have the wrapper's name in theirs",
            why="Code that looks up parameters by name (adapters, optimizers with groups, weight transfer) misses "
            "them, without an error.",
            change="Do not use checkpoint_wrapper, or strip “_checkpoint_wrapped_module.” everywhere.",
            actmem=f"Names do not change: {_FULL}",
        )


# ---------------------------------------------------------------- inspecting a model


def _severity(case: Case) -> Severity:
    """Return "problem" if torch's checkpointing is on; otherwise nothing is wrong yet, so "note"."""
    return "problem" if case.checkpointing else "note"


def _with(case: Case) -> str:
    return f", with {case.checkpointing}" if case.checkpointing else ""


def _rate_of(module: nn.Module) -> float:
    """Return the highest dropout rate among a module's attributes."""
    if isinstance(module, nn.RReLU):
        return 1.0
    rates: list[Any] = [module.p] if isinstance(module, _RANDOM) else [getattr(module, name, 0.0) for name in _RATES]
    return max((float(rate) for rate in rates if isinstance(rate, int | float)), default=0.0)


def _with_graph(module: nn.Module) -> Iterator[str]:
    for name, value in vars(module).items():
        if name == "_parameters" or name == "_modules":
            continue
        inner = list(cast("Mapping[Any, Any]", value).values()) if isinstance(value, dict) else value
        each = cast("list[Any]", inner) if isinstance(inner, list | tuple) else [inner]
        if any(isinstance(t, Tensor) and t.grad_fn is not None for t in each):
            yield name


def _in_context(function: Any) -> Iterator[Any]:
    """Yield the operators that a policy's context function closes over."""
    values: list[Any] = [*getattr(function, "args", ()), *getattr(function, "keywords", {}).values()]
    inner = getattr(function, "func", function)
    values += [cell.cell_contents for cell in getattr(inner, "__closure__", None) or () if _is_filled(cell)]
    for value in values:
        if isinstance(value, list | tuple | set | frozenset):
            yield from cast("list[Any]", value)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _tower(case: Case, name: str) -> tuple[Block, ...]:
    try:
        return find_blocks(case.the_model, scope=[name])
    except StructureError:
        return ()


def _covers(mode: Mode | Plan, root: str) -> bool:
    return isinstance(mode, Plan) and any(path.startswith(f"{root}.") for path in mode.blocks)


def _common(blocks: tuple[Block, ...]) -> str:
    """Return the path of the tower that contains the blocks."""
    split = [b.path.split(".") for b in blocks]
    shared: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    # The last shared names are those of the block list and its encoder. Layers before the blocks are further up.
    while shared and shared[-1] in ("layers", "layer", "blocks", "encoder", "h"):
        shared.pop()
    return ".".join(shared)
