"""Checks of settings against each other: two that recompute, forms that do not go together, blocks that do nothing."""

from __future__ import annotations

from collections.abc import Iterator

from actmem.diagnosis.bugs import is_before, version_of
from actmem.diagnosis.findings import Finding
from actmem.diagnosis.regions import SWITCH, WRAPPER, Case

__all__ = [
    "adapters_reentrant",
    "cuda_graphs",
    "ddp_reentrant",
    "embedding_of",
    "inert_block",
    "is_transformers",
    "recomputing_twice",
    "zero3_frozen",
]

_FULL = "actmem.apply(model, actmem.Full())"
_LAST_WITHOUT_FIX = "0.19.2"


def recomputing_twice(case: Case) -> Iterator[Finding]:
    """Look for two that recompute."""
    asked = {SWITCH: case.setup.checkpointing, WRAPPER: case.setup.fsdp_checkpointing}
    # What is in the model already is what the settings ask for, where they do.
    there = {region.by: f"{region.by} at {region.path or 'the model itself'}" for region in case.regions}
    both = [place for by in (SWITCH, WRAPPER) if (place := asked[by] or there.get(by))]
    if len(both) > 1:
        yield Finding(
            check="recomputing-twice",
            severity="problem",
            found=" and ".join(both),
            why="Each block would be recomputed inside a recomputation; transformers' Trainer refuses to start.",
            change="Switch one off: gradient_checkpointing=False.",
            actmem="actmem.apply refuses a model that recomputes by other means: switch both off.",
        )
    elif case.mode is not None and both:
        yield Finding(
            check="recomputing-twice",
            severity="problem",
            found=f"{both[0]}, beside the mode {case.mode!r}",
            why="actmem.apply raises an ApplyError: two that recompute would do the work twice.",
            change="gradient_checkpointing=False, and model.gradient_checkpointing_disable() where it is on already.",
            actmem="Decides for every activation, once it is alone.",
        )


def inert_block(case: Case) -> Iterator[Finding]:
    """Look for settings of DeepSpeed that nothing reads."""
    if case.setup.deepspeed_block and (case.setup.trainer or is_transformers(case)):
        yield Finding(
            check="inert-block",
            severity="warning" if case.setup.checkpointing else "problem",
            found=f"{case.setup.deepspeed_block}, with {case.setup.trainer or 'a model of transformers'}",
            why="Only code that calls deepspeed.checkpointing.checkpoint reads this block. transformers does not, so "
            "it "
            "does nothing.",
            change="Remove the block; gradient_checkpointing=True switches transformers' own form on.",
            actmem=f"{_FULL}, which applied.report() shows at work.",
        )


def ddp_reentrant(case: Case) -> Iterator[Finding]:
    """Look for reentrant checkpointing under DDP."""
    if case.reentrant and case.data_parallel:
        shared = case.model is not None and _shares(case)
        yield Finding(
            check="ddp-reentrant",
            severity="problem" if case.setup.find_unused or shared else "warning",
            found=f"{case.reentrant}, under DDP ({case.data_parallel})",
            why="With unused or shared parameters DDP raises “Expected to mark a variable ready only once”: the "
            "reentrant "
            "form runs backward inside backward.",
            change="gradient_checkpointing_kwargs={'use_reentrant': False}, and ddp_find_unused_parameters=False.",
            actmem=f"There is one backward, as in plain training: {_FULL}",
        )


def adapters_reentrant(case: Case) -> Iterator[Finding]:
    """Look for reentrant checkpointing of a model whose inputs need no gradient."""
    if case.reentrant is None:
        return
    adapters = case.adapters
    embedding = embedding_of(case)
    frozen = embedding is not None and not any(p.requires_grad for p in embedding.parameters())
    hooked = embedding is not None and len(embedding._forward_hooks) > 0  # pyright: ignore[reportPrivateUsage]
    if (adapters or frozen) and any(p.requires_grad for p in case.the_model.parameters()):
        yield Finding(
            check="adapters-reentrant",
            severity="note" if hooked or not frozen else "problem",
            found=f"{case.reentrant}, with {adapters or 'a frozen embedding'}"
            f"{', whose output is made to need gradients by a hook' if hooked else ''}",
            why="Where no input of a block needs a gradient, the reentrant form gives its parameters none: adapters "
            "stay "
            "as they were initialised, and nothing is said but a warning.",
            change="gradient_checkpointing_kwargs={'use_reentrant': False}, or model.enable_input_require_grads().",
            actmem=f"Gradients flow as in plain training: {_FULL}",
        )


def cuda_graphs(case: Case) -> Iterator[Finding]:
    """Look for CUDA graphs together with checkpointing."""
    mode = case.setup.compile_mode
    if mode in ("reduce-overhead", "max-autotune") and case.checkpointing:
        yield Finding(
            check="cuda-graphs",
            severity="problem" if mode == "reduce-overhead" else "warning",
            found=f"torch.compile mode {mode!r} with {case.checkpointing}",
            why="That mode records CUDA graphs, and recomputation frees tensors in another order than was recorded "
            "(https://github.com/pytorch/pytorch/issues/154306).",
            change="torch_compile_mode='default'.",
            actmem="Not tried on an accelerator yet.",
        )


def zero3_frozen(case: Case) -> Iterator[Finding]:
    """Look for ZeRO-3 with frozen parameters under non-reentrant checkpointing."""
    if case.setup.zero_stage != 3 or case.checkpointing is None or case.reentrant is not None:
        return
    if all(p.requires_grad for p in case.the_model.parameters()):
        return
    installed = version_of(case, "deepspeed")
    old = installed is not None and not is_before(_LAST_WITHOUT_FIX, installed)
    yield Finding(
        check="zero3-frozen",
        severity="problem" if old else "warning",
        found=f"ZeRO stage 3, {case.adapters or 'frozen parameters'}, {case.checkpointing}, "
        f"DeepSpeed {installed or 'not installed here'}",
        why="ZeRO-3 gives the memory of frozen parameters back before the recomputation is checked: “recomputed … "
        "shape "
        "[0]”. DeepSpeed 0.19.2 does; its pull request 8148 repairs it.",
        change="Use a DeepSpeed that has pull request 8148.",
        actmem="Not tried: actmem has not been run under DeepSpeed.",
    )


def is_transformers(case: Case) -> bool:
    """Tell whether the model, or a part of it, is one of transformers."""
    return case.model is not None and any(hasattr(m, "gradient_checkpointing_enable") for _, m in case.modules)


def embedding_of(case: Case):
    """Return what the model's inputs pass first, if it says so."""
    get = getattr(case.the_model, "get_input_embeddings", None)
    if get is None:
        return None
    try:
        return get()
    except (NotImplementedError, AttributeError):
        return None


def _shares(case: Case) -> bool:
    once = sum(1 for _ in case.the_model.parameters())
    return sum(1 for _ in case.the_model.named_parameters(remove_duplicate=False)) > once
