"""Checks for stacked or inactive parts: offloading enabled twice, skipped layers, a model that is not being trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from actmem.diagnosis.configured import embedding_of, is_transformers
from actmem.diagnosis.findings import Finding, paths
from actmem.diagnosis.regions import SWITCH, Case
from actmem.plan import Plan

__all__ = ["evaluating", "every_nth", "nothing_trained", "reentrant", "stacked_offloaders", "unknown_settings"]

_FULL = "actmem.apply(model, actmem.Full())"


def stacked_offloaders(case: Case) -> Iterator[Finding]:
    """Look for two mechanisms that offload the same saved tensors."""
    found = [*case.setup.offloaders, *_in_model(case)]
    if case.setup.inert_offloader and not (case.setup.trainer or is_transformers(case)):
        found.append(case.setup.inert_offloader)
    offload = case.mode.offload if isinstance(case.mode, Plan) else getattr(case.mode, "offload", None)
    if offload is not None:
        found.append(f"the mode {case.mode!r}")
    if len(found) > 1:
        yield Finding(
            check="stacked-offloaders",
            severity="problem",
            found=" and ".join(found),
            why="Each installs saved-tensor hooks, and the inner one gets every tensor: the outer one has no effect, "
            "or offloads what is already offloaded.",
            change="Keep one and switch the others off.",
            actmem="actmem.compat.axolotl.ActivationOffloadingMixin takes over the argument of TRL's trainers. None "
            "of the others can be combined with actmem's offloading.",
        )


def every_nth(case: Case) -> Iterator[Finding]:
    """Look for checkpointing of every n-th layer only."""
    found, every = case.setup.every_nth, "n"
    if found is not None:
        every = found.split(" = ")[1].split(" ")[0]
    elif case.model is not None:
        layers = [m for _, m in case.modules if hasattr(type(m), "gradient_checkpointing") and _has_call(m)]
        on = sum(getattr(m, "gradient_checkpointing", False) is True for m in layers)
        if 0 < on < len(layers):
            found = f"{on} of {len(layers)} layers have {SWITCH} on"
    if found is not None:
        yield Finding(
            check="every-nth-layer",
            severity="note",
            found=found,
            why="The other layers hold all their activations, which then dominate memory.",
            change="every_n_layers=1 checkpoints all layers.",
            actmem=f"actmem.Full(every={every}) does the same. A budget decides per activation instead of per layer: "
            "actmem.apply(model, actmem.Budget('72GiB', device='h100-80gb'), example=batch).",
        )


def reentrant(case: Case) -> Iterator[Finding]:
    """Look for reentrant checkpointing that no more specific check reports."""
    if case.reentrant is None or case.data_parallel or (case.model is not None and _cuts_gradients(case)):
        return
    yield Finding(
        check="reentrant",
        severity="warning",
        found=case.reentrant,
        why="The reentrant form runs the forward pass without a graph: no torch.autograd.grad, no retain_graph, no "
        "keyword arguments for the block, no gradients for the parameters of a block whose inputs require none, and no "
        "check that recomputation matches the forward pass.",
        change="gradient_checkpointing_kwargs={'use_reentrant': False}.",
        actmem=f"There is one forward pass and one graph, as in plain training: {_FULL}",
    )


def nothing_trained(case: Case) -> Iterator[Finding]:
    """Look for a model without trainable parameters."""
    parameters = list(case.the_model.parameters())
    if parameters and not any(p.requires_grad for p in parameters):
        yield Finding(
            check="nothing-trained",
            severity="problem",
            found=f"none of the {len(parameters)} parameters requires a gradient",
            why="Nothing is held for the backward pass, so there is nothing to recompute or offload; backward raises "
            "“element 0 of tensors does not require grad”.",
            change="model.requires_grad_(True), or add the adapters first.",
            actmem="Has no effect on such a model: there is nothing to decide.",
        )


def evaluating(case: Case) -> Iterator[Finding]:
    """Look for a model, or blocks of one, in eval mode."""
    model = case.the_model
    # A part that is both frozen and in eval mode is intentional.
    off = [p for p, m in case.modules if p and not m.training and any(w.requires_grad for w in m.parameters())]
    if model.training and not off:
        return
    found = "model.training is False" if not model.training else f"in eval mode: {paths(_outermost(off))}"
    yield Finding(
        check="evaluating",
        severity="note" if case.setup.trainer and not model.training else "warning",
        found=found,
        why="In eval mode transformers' checkpointing and actmem's blocks do nothing, and dropout is off. "
        "from_pretrained returns a model in eval mode; a Trainer switches to training mode by itself.",
        change="model.train() before training.",
        actmem="A block in eval mode runs as if nothing were applied.",
    )


def unknown_settings(case: Case) -> Iterator[Finding]:
    """Look for settings under keys that nothing reads."""
    if case.setup.unknown:
        yield Finding(
            check="unknown-keys",
            severity="warning",
            found="; ".join(text.rstrip(".") for text in case.setup.unknown),
            why="The library that receives such a key raises an error late, or ignores it, and the setting stays at "
            "its default.",
            change="Correct the key, or remove it.",
            actmem="Unknown keys in actmem's own settings raise an error.",
        )


def _in_model(case: Case) -> list[str]:
    """Find offloading that is already in the model: torch's wrapper, and transformers' switch with `offload`."""
    if case.model is None:
        return []
    wrapped = [path for path, module in case.modules if type(module).__name__ == "OffloadWrapper"]
    switched = [r.path for r in case.regions if r.by == SWITCH and _sends(r.module)]
    found = [f"torch's offload_wrapper at {paths(wrapped, most=1)}"] if wrapped else []
    # If the settings ask for offloading, what is in the model already comes from them and counts once.
    asked = any("gradient_checkpointing_kwargs" in text for text in case.setup.offloaders)
    return found if not switched or asked else [*found, f"offload=True in {SWITCH} at {paths(switched, most=1)}"]


def _sends(module: Any) -> bool:
    function = getattr(getattr(module, "_gradient_checkpointing_func", None), "func", None)
    return "gradient_checkpointing_enable.<locals>" in getattr(function, "__qualname__", "")


def _has_call(module: Any) -> bool:
    return "GradientCheckpointingLayer" in {kind.__name__ for kind in type(module).__mro__}


def _cuts_gradients(case: Case) -> bool:
    """Whether `adapters-reentrant` covers this case in more detail."""
    embedding = embedding_of(case)
    return case.adapters is not None or (
        embedding is not None and not any(p.requires_grad for p in embedding.parameters())
    )


def _outermost(found: list[str]) -> list[str]:
    return [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
