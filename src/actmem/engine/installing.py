"""Exchanging the class of a block, so that its forward asks an engine.

NOTE [ How a block is applied ]
The block's class is exchanged for a subclass of itself, whose `forward` asks the block's `Script` what to do. Nothing
is written to the instance: names, hooks, `state_dict` and the module tree stay as they are, and because the subclass
reduces to its parent, a deepcopy or a pickle of an applied model is a plain one. `forward` lies inside the module's
hooks, so that what FSDP gathers before and frees after it stays outside.

Blocks of one class for which the plan says the same (a `Family`) get the same subclass. So Dynamo, which asks for the
class of a module before it uses a graph again, compiles one graph for all of them, as it does for the plain model.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch
from torch import nn

from actmem.engine.calling import Script
from actmem.engine.checkpoint import Family
from actmem.errors import UnsupportedError
from actmem.torchcompat import apart_from_graphs, checkpoint, never_compile

__all__ = ["applied_script", "install", "uninstall"]


def install(block: nn.Module, script: Script, classes: dict[Any, type]) -> None:
    """Change the class of `block` so that its forward asks `script`. See NOTE [ How a block is applied ].

    Args:
        block: the module.
        script: what to do when it is called.
        classes: the subclasses made so far for this model, by original class and family.
    """
    original: Any = type(block)
    key = original, script.family
    if key not in classes:
        classes[key] = _subclass(original, script.family)
    vars(classes[key])["_actmem_scripts"][id(block)] = script
    block.__class__ = classes[key]


def _subclass(original: Any, family: Family) -> type:
    plain, context = original.forward, family.traced
    scripts: dict[int, Script] = {}
    is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

    @never_compile
    def run(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A replica, as DataParallel makes them, has no script of its own.
        script = scripts.get(id(self)) or next(iter(scripts.values()))
        return script.run(self, plain, args, kwargs)

    @never_compile
    def given_up(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (script := scripts.get(id(self))) is not None:
            script.given_up = True
        return run(self, args, kwargs) if is_grad_enabled() else plain(self, *args, **kwargs)

    @apart_from_graphs
    def refuse(self: nn.Module) -> Any:
        raise UnsupportedError(
            f"{scripts[id(self)].path} is compiled, and its plan {family.refused}, which no compiled graph does. "
            "Keep the block out of graphs: actmem.apply(..., engine='tape'), or choose another mode."
        )

    apart = apart_from_graphs(run)

    def traced(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_compiling():
            return given_up(self, args, kwargs)  # see NOTE [ Under torch.compile ]
        if not (self.training and is_grad_enabled() and family.active) or family.verdicts_keep_everything:
            return plain(self, *args, **kwargs)
        if family.refused:
            return refuse(self)
        if not family.traceable:
            return apart(self, args, kwargs)
        # A graph break inside a `try` makes Dynamo give up this frame, and only then can the tape have it.
        try:
            return checkpoint(plain, self, *args, use_reentrant=False, context_fn=context, **kwargs)
        finally:
            pass

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return traced(self, args, kwargs)
        if is_grad_enabled():
            return run(self, args, kwargs)
        return plain(self, *args, **kwargs)

    def reduce(self: nn.Module, _protocol: Any) -> Any:
        # As object.__reduce_ex__ does it, but for the parent class. (pickle refuses its usual `__newobj__` for another
        # class.)
        again: Any = getattr(copyreg, "_reconstructor")  # noqa: B009 - private, but what every old pickle names
        state: Any = self.__getstate__()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType, reportUnknownMemberType]
        return again, (original, object, None), state

    forward.__doc__ = original.forward.__doc__
    forward.__wrapped__ = original.forward  # pyright: ignore[reportFunctionMemberAccess] # inspect.signature follows it
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "forward": forward,
        "__reduce_ex__": reduce,
        "_actmem_scripts": scripts,
        "_actmem_original": original,
    }
    return type(original.__name__, (original,), names)


def applied_script(block: nn.Module) -> Script | None:
    """Return the script of an applied block, or None."""
    scripts: dict[int, Script] = getattr(type(block), "_actmem_scripts", {})
    script = scripts.get(id(block))
    return script if script is not None and script.active else None


def uninstall(block: nn.Module, script: Script) -> None:
    """Change the class of `block` back.

    Where another library subclassed it since, as FSDP does, what was put in is made to do nothing instead.
    """
    script.active = script.family.active = False
    if vars(type(block)).get("_actmem_scripts", {}).get(id(block)) is script:
        block.__class__ = vars(type(block))["_actmem_original"]
