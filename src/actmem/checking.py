"""Refusing before anything is changed: models that cannot be applied, and rules that can match nothing."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from actmem import ops
from actmem.engine.installing import applied_script
from actmem.errors import ApplyError, ModeError
from actmem.plan import Plan, Rule, Slices
from actmem.settings import Offload
from actmem.structure import Block
from actmem.torchcompat import all_operator_names, named_modules

__all__ = ["check_offload", "check_rules", "device_of", "refuse_blocks", "refuse_host_on_cpu", "refuse_state"]


def refuse_state(model: nn.Module) -> None:
    """Refuse a model that is applied already, or that recomputes by other means."""
    for path, module in named_modules(model):
        if (script := applied_script(module)) is not None:
            raise ApplyError(
                f"a plan is applied to this model already, at {script.path or 'the model itself'} and others. "
                "Remove it first: applied.remove(), on what actmem.apply returned."
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ApplyError(
                f"{path or 'the model'}.gradient_checkpointing = True: Hugging Face gradient checkpointing is on, "
                "and would run the forward code twice. "
                "Switch it off first: model.gradient_checkpointing_disable()."
            )
        if hasattr(module, "_checkpoint_wrapped_module"):
            raise ApplyError(
                f"{path or 'the model'} is wrapped by torch's checkpoint_wrapper, which recomputes on its own account. "
                "Build the model without that wrapper, and let actmem decide."
            )


def refuse_blocks(blocks: tuple[Block, ...]) -> None:
    """Refuse blocks whose forward actmem could not reach."""
    for block in blocks:
        if "forward" in vars(block.module):
            raise ApplyError(
                f"{block.path or 'the model'} has a forward of its own in the instance (accelerate's hooks put "
                "one there), which would bypass actmem. "
                "Apply actmem before the library that sets it."
            )


def check_rules(
    rules: tuple[Rule, ...],
    blocks: tuple[Block, ...],
    every_role: Sequence[dict[str, tuple[str, ...]]],
    layer_types: Sequence[str | None],
    model: nn.Module,
) -> None:
    """Refuse rules that name what does not exist, or that can match nothing in this model.

    A rule that names an operator besides a target or a layer type only narrows: it may find nothing, and the report
    says so.
    """
    for op in dict.fromkeys(rule.op for rule in rules if rule.op is not None):
        _check_operator(op)
    for rule in rules:
        if rule.module is not None:
            _check_module(rule, model)
        chosen = [b for b in blocks if rule.layers is None or Slices.parse(rule.layers).contains(b.index, len(blocks))]
        if not chosen:
            raise ModeError(
                f"layers = {rule.layers!r} selects none of the {len(blocks)} blocks (0 to {len(blocks) - 1}). "
                f"Name some of these, as in layers='0:{len(blocks)}'."
            )
        if rule.op is not None:
            continue
        types = sorted({kind for b in chosen if (kind := layer_types[b.index]) is not None})
        if rule.layer_type is not None and not any(fnmatchcase(kind, rule.layer_type) for kind in types):
            raise ModeError(
                f"layer_type = {rule.layer_type!r} matches no block of this model. Types that would match: "
                f"{', '.join(types) or 'none, this model does not tell its layers apart by type'}."
                f"{ops.did_you_mean(rule.layer_type, types)}"
            )
        if rule.target is not None and not any(rule.target in every_role[b.index] for b in chosen):
            present = sorted({name for b in chosen for name in every_role[b.index]})
            raise ModeError(
                f"target {rule.target!r} matches no module in the blocks of this model. "
                f"Targets that would match: {', '.join(present) or 'none'}."
            )


def check_offload(plan: Plan, model: nn.Module, engine: str) -> None:
    """Refuse to offload where nothing says how, or where it would do nothing."""
    asked = next((rule for rule in plan.rules if rule.decision == "offload"), None)
    if asked is None and plan.offload is None:
        return
    if asked is None:
        raise ModeError(f"{plan.offload!r} is given, but no rule offloads. Leave it out, or add Rule('offload', ...).")
    if plan.offload is None:
        raise ModeError(
            f"{asked!r} offloads, but nothing says where to. Write Rules([...], offload=Offload(to='disk'))."
        )
    if engine == "checkpoint":
        raise ModeError(
            f"{asked!r} offloads, which the tape does, and engine = 'checkpoint' is torch's own. Leave engine out."
        )
    refuse_host_on_cpu(plan.offload, model)


def refuse_host_on_cpu(offload: Offload, model: nn.Module) -> None:
    """Refuse to send what is in host memory already to host memory."""
    if offload.to == "host" and not offload.copy_cpu and device_of(model).type == "cpu":
        raise ModeError(
            "to = 'host', but the model is on the CPU: its activations are in host memory already. Write to='disk', "
            "move the model to an accelerator first, or, for a test, say copy_cpu=True."
        )


def device_of(model: nn.Module) -> torch.device:
    """Return the device that the model's parameters are on; an accelerator's where they are on several."""
    devices = {p.device for p in model.parameters()}
    return next((d for d in devices if d.type not in ("cpu", "meta")), next(iter(devices), torch.device("cpu")))


def _check_operator(selector: str) -> None:
    if selector in ops.GROUPS or selector == ops.INPUT or selector.startswith("replayable."):
        return
    known = all_operator_names() | ops.HIGHER_ORDER
    for part in selector.split("|"):
        if part in ops.GROUPS:
            continue
        packet = None if ops.is_glob(part) else ops.packet_name(part)[0]
        if not any(ops.matches(part, name, "default") or name == packet for name in known):
            hint = ops.did_you_mean(part, sorted({*known, *ops.GROUPS}))
            raise ModeError(
                f"op = {part!r} is no operator, group or glob that torch knows.{hint} Groups: "
                f"{', '.join(sorted(ops.GROUPS))}."
            )


def _check_module(rule: Rule, model: nn.Module) -> None:
    assert rule.module is not None
    paths = [path for path, _ in named_modules(model) if path]
    if not any(fnmatchcase(path, rule.module) for path in paths):
        wanted = rule.module.strip("*.")
        hint = ops.did_you_mean(wanted, paths if "." in wanted else dict.fromkeys(p.rpartition(".")[2] for p in paths))
        example = max(paths, key=lambda path: path.count("."))
        raise ModeError(
            f"module = {rule.module!r} matches no module of this model.{hint} A glob is matched against whole "
            f"paths, such as {example!r}: module='*{example.rpartition('.')[1]}{example.rpartition('.')[2]}'."
        )
