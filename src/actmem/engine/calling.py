"""Running an applied block: which way its forward goes, and the tape around it.

NOTE [ How a block is applied ]
The block's class is exchanged for a subclass of itself, made for this one instance, whose `forward` asks the `Script`
what to do. Nothing is written to the instance: names, hooks, `state_dict` and the module tree stay as they are, and
because the subclass reduces to its parent, a deepcopy or a pickle of an applied model is a plain one. `forward` lies
inside the module's hooks, so that what FSDP gathers before and frees after it stays outside the tape.
"""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from actmem.engine.cutting import Cut, smallest_cut
from actmem.engine.deciding import Verdicts
from actmem.engine.observing import Observation
from actmem.engine.replay import unpack
from actmem.engine.tape import Tape
from actmem.engine.trees import tensors
from actmem.errors import UnsupportedError
from actmem.torchcompat import functorch_transform, named_modules, outer_hooks, storage_key

__all__ = ["Script", "applied_script", "install", "storages_of", "uninstall"]


class Script:
    """What to do when one applied block is called."""

    def __init__(
        self,
        path: str,
        verdicts: Verdicts,
        *,
        cuts: dict[Any, Cut | None],
        observed: Callable[[], None],
        state: Callable[[], frozenset[int]],
    ) -> None:
        self.path = path
        self.verdicts = verdicts
        self.num_checked = 1
        """How many of the next calls are observed, and check each replay against a checksum."""
        self.idle = False
        """Nothing is left to do: the plan saves everything here, and the report has seen it."""
        self.num_idle_calls = 0
        """Calls with gradients on that were left alone because the block was in eval mode."""
        self.observation: Observation | None = None
        """The latest call that was observed."""
        self.active = True
        self._observed = observed
        """Called after each observed forward."""
        self._state = state
        """Returns the storages of the model's parameters and buffers."""
        self._cuts = cuts
        """The smallest cuts of the programs seen so far, shared by all blocks."""
        self._cut: Cut | None = None
        self._cut_shapes: Any = None
        """The shapes of the arguments for which the cut is the smallest: for others it may hold more than plain."""
        self._nested: frozenset[int] = frozenset()

    def run(self, block: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block's own forward, under a tape if this call needs one."""
        if not self.active or self.idle:
            return forward(block, *args, **kwargs)
        if not block.training:
            self.num_idle_calls += 1
            return forward(block, *args, **kwargs)
        inputs = list(tensors(args, kwargs))
        if not any(t.requires_grad for t in inputs) and not any(p.requires_grad for p in block.parameters()):
            return forward(block, *args, **kwargs)
        self._refuse()
        if not self.num_checked:
            return self._record(block, forward, args, kwargs, inputs, None)
        self.num_checked -= 1
        self.idle = not self.num_checked and self.verdicts.keeps_everything
        self._nested = _fsdp_units(block)
        self.observation = Observation(self._state())
        out = self._record(block, forward, args, kwargs, inputs, self.observation)
        self._cut_program(self.observation, inputs)
        self._observed()
        return out

    def _record(
        self,
        block: nn.Module,
        forward: Any,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        observation: Observation | None,
    ) -> Any:
        tape = Tape(
            self.verdicts,
            observation,
            inputs=inputs,
            trainable=lambda: _trainable_storages(block),
            cut=self._cut if self._cut is not None and self._cut_fits(inputs) else None,
        )
        try:
            with torch.autograd.graph.saved_tensors_hooks(tape.pack, unpack):
                if observation is not None or self._nested or self.verdicts.follows_modules:
                    with _Following(tape, block, self._nested), tape:
                        return forward(block, *args, **kwargs)
                with tape:
                    return forward(block, *args, **kwargs)
        except RuntimeError as error:
            if "don't yet support saved tensor hooks" in str(error):
                raise UnsupportedError(_functorch_message(self.path, "inside")) from error
            raise
        finally:
            tape.close()

    def _cut_program(self, observation: Observation, inputs: list[Tensor]) -> None:
        """Find the smallest cut of what ran. If there is one, the next call is observed too: it will hold less."""
        if self._cut is None:
            self._cut_shapes = _shapes(inputs)
            key = observation.signature()
            if key not in self._cuts:
                self._cuts[key] = smallest_cut(observation.rows, observation.funcs)
            self._cut = self._cuts[key]
            if self._cut is not None:
                self.num_checked = max(self.num_checked, 1)
        observation.forget_program()

    def _cut_fits(self, inputs: list[Tensor]) -> bool:
        # A checkpoint around the block counts what is saved, and wants the same number when it runs the block again.
        return self._cut_shapes == _shapes(inputs) and outer_hooks() is None

    def _refuse(self) -> None:
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                f"{self.path} is being compiled by torch.compile, and the tape records eager operators only. Compile "
                "functions inside the block, or call applied.remove() before compiling."
            )
        if functorch_transform() == "Grad":
            raise UnsupportedError(_functorch_message(self.path, "around"))


def _trainable_storages(block: nn.Module) -> frozenset[int]:
    return frozenset(storages_of([p for p in block.parameters() if p.requires_grad]))


def _shapes(inputs: list[Tensor]) -> list[Any]:
    return [t.shape for t in inputs if not t.is_nested]


def _functorch_message(path: str, where: str) -> str:
    return (
        f"torch.func.grad runs {where} {path}, and functorch does not let anything see what autograd saves there "
        "(torch.utils.checkpoint fails in the same place). Use torch.autograd.grad instead, or leave this block out: "
        "blocks='...'."
    )


# -------------------------------------------------------------------- the class exchange


def install(block: nn.Module, script: Script) -> None:
    """Change the class of `block` so that its forward asks `script`. See NOTE [ How a block is applied ]."""
    original: Any = type(block)
    plain, run, is_grad_enabled = original.forward, script.run, torch.is_grad_enabled

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_grad_enabled():
            return run(self, plain, args, kwargs)
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
        "_actmem_script": script,
        "_actmem_original": original,
    }
    block.__class__ = type(original.__name__, (original,), names)


def applied_script(block: nn.Module) -> Script | None:
    """Return the script of an applied block, or None."""
    script: Script | None = getattr(type(block), "_actmem_script", None)
    return script if script is not None and script.active else None


def uninstall(block: nn.Module, script: Script) -> None:
    """Change the class of `block` back.

    Where another library subclassed it since, as FSDP does, what was put in is made to do nothing instead.
    """
    script.active = False
    if vars(type(block)).get("_actmem_script") is script:
        block.__class__ = vars(type(block))["_actmem_original"]


# -------------------------------------------------------------------- following modules

_current = threading.local()


class _Following:
    """Keep `tape.address` at the path of the module that runs, while entered."""

    def __init__(self, tape: Tape, block: nn.Module, nested: frozenset[int]) -> None:
        self._tape = tape
        self._paths = {id(m): name for name, m in named_modules(block)}
        self._nested = nested
        self._stack: list[str] = []
        self._handles: list[Any] = []
        self._outer: Tape | None = None

    def __enter__(self) -> None:
        self._outer = getattr(_current, "tape", None)
        _current.tape = self._tape
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._before),
            module_hooks.register_module_forward_hook(self._after, always_call=True),
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _current.tape = self._outer

    def _before(self, module: nn.Module, _: Any) -> None:
        if getattr(_current, "tape", None) is self._tape:  # hooks are global; other threads run modules too
            self._stack.append(self._tape.address)
            self._tape.address = self._paths.get(id(module), self._tape.address)

    def _after(self, module: nn.Module, _: Any, out: Any) -> None:
        if getattr(_current, "tape", None) is self._tape and self._stack:
            if id(module) in self._nested:
                self._tape.keep_outputs(out)
            self._tape.address = self._stack.pop()


def _fsdp_units(block: nn.Module) -> frozenset[int]:
    """Return the modules inside the block that FSDP shards on their own."""
    fsdp: Any = getattr(torch.distributed, "fsdp", None)
    if fsdp is None:
        return frozenset()
    kinds = tuple(
        k for k in (getattr(fsdp, "FSDPModule", None), getattr(fsdp, "FullyShardedDataParallel", None)) if k is not None
    )
    return frozenset(id(m) for m in block.modules() if m is not block and isinstance(m, kinds))


def storages_of(items: list[Tensor]) -> set[int]:
    """Return the identities of the storages on which the tensors lie."""
    found: set[int] = set()
    for t in items:
        try:
            found.add(storage_key(t.untyped_storage()))
        except (NotImplementedError, RuntimeError):  # sparse, or a wrapper subclass without bytes of its own
            continue
    return found
