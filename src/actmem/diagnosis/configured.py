"""Checks for conflicting settings: recomputation enabled twice, incompatible options, blocks that have no effect."""

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
    """Look for recomputation that is enabled twice."""
    asked = {SWITCH: case.setup.checkpointing, WRAPPER: case.setup.fsdp_checkpointing}
    # If the settings ask for recomputation, what is in the model already comes from them and counts once.
    there = {region.by: f"{region.by} at {region.path or 'the model itself'}" for region in case.regions}
    both = [place for by in (SWITCH, WRAPPER) if (place := asked[by] or there.get(by))]
    if len(both) > 1:
        yield Finding(
            check="recomputing-twice",
            severity="problem",
            found=" and ".join(both),
            why="Each block would be recomputed inside another recomputation; transformers' Trainer refuses to start.",
            change="Switch one off: gradient_checkpointing=False.",
            actmem="actmem.apply refuses a model with other recomputation: switch both off.",
        )
    elif case.mode is not None and both:
        yield Finding(
            check="recomputing-twice",
            severity="problem",
            found=f"{both[0]}, together with the mode {case.mode!r}",
            why="actmem.apply raises an ApplyError: with both, the work would be done twice.",
            change="gradient_checkpointing=False, and model.gradient_checkpointing_disable() where it is already on.",
            actmem="Decides for every activation, once nothing else recomputes.",
        )


def inert_block(case: Case) -> Iterator[Finding]:
    """Look for DeepSpeed settings that have no effect."""
    if case.setup.deepspeed_block and (case.setup.trainer or is_transformers(case)):
        yield Finding(
            check="inert-block",
            severity="warning" if case.setup.checkpointing else "problem",
            found=f"{case.setup.deepspeed_block}, with {case.setup.trainer or 'a transformers model'}",
            why="Only code that calls deepspeed.checkpointing.checkpoint reads this block. transformers does not call "
            "it, so the block has no effect.",
            change="Remove the block; gradient_checkpointing=True enables transformers' own checkpointing.",
            actmem=f"{_FULL}; applied.report() shows its effect.",
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
            "reentrant form runs a backward pass inside the backward pass.",
            change="gradient_checkpointing_kwargs={'use_reentrant': False}, and ddp_find_unused_parameters=False.",
            actmem=f"There is one backward pass, as in plain training: {_FULL}",
        )


def adapters_reentrant(case: Case) -> Iterator[Finding]:
    """Look for reentrant checkpointing of a model whose inputs do not require gradients."""
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
            f"{', whose output a hook makes require gradients' if hooked else ''}",
            why="If no input of a block requires a gradient, the reentrant form computes none for its parameters: "
            "adapters stay as initialised, with no more than a warning.",
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
            why="That mode records CUDA graphs, and recomputation frees tensors in a different order from the recorded "
            "one (https://github.com/pytorch/pytorch/issues/154306).",
            change="torch_compile_mode='default'.",
            actmem="Not yet tested on an accelerator.",
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
        why="ZeRO-3 frees the memory of frozen parameters before the recomputation is checked: “recomputed … shape "
        "[0]”. DeepSpeed 0.19.2 has this defect; its pull request 8148 fixes it.",
        change="Use a DeepSpeed version that includes pull request 8148.",
        actmem="Not tested: actmem has not been run under DeepSpeed.",
    )


def is_transformers(case: Case) -> bool:
    """Whether the model, or a part of it, comes from transformers."""
    return case.model is not None and any(hasattr(m, "gradient_checkpointing_enable") for _, m in case.modules)


def embedding_of(case: Case):
    """Return the model's input embedding, if the model names one."""
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
