"""Running an applied block in eager: whether it needs an engine at all, which one, and the tape around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from actmem.engine.away import Away
from actmem.engine.checkpoint import Family, run_checkpointed
from actmem.engine.cutting import Cut, smallest_cut
from actmem.engine.following import Following
from actmem.engine.observing import Observation
from actmem.engine.operators import DESCRIBED
from actmem.engine.replay import unpack
from actmem.engine.tape import Tape
from actmem.engine.tracing import Traced, Tracer
from actmem.engine.trees import tensors
from actmem.errors import UnsupportedError
from actmem.offloading.transfer import Offloader
from actmem.settings import Offload
from actmem.torchcompat import functorch_transform, hand_out_parameters, never_compile, outer_hooks, storage_key

__all__ = ["Script", "local", "storages_of"]


class Script:
    """What to do when one applied block is called."""

    def __init__(
        self,
        path: str,
        family: Family,
        *,
        engine: str,
        cuts: dict[Any, Cut | None],
        observed: Callable[[], None],
        state: Callable[[], frozenset[int]],
        reissue: bool = False,
        offloader: Offloader | None = None,
        offload: Offload | None = None,
        exact: bool = False,
    ) -> None:
        self.path = path
        self.family = family
        self.verdicts = family.verdicts
        self.engine = engine
        """Which engine runs in eager: "tape", "checkpoint", or "none", where only a compiled graph can do it."""
        self.num_checked = 1
        """How many of the next calls are observed, and check each replay against a checksum."""
        self.idle = False
        """Nothing is left to do: the plan saves everything here, and the report has seen it."""
        self.num_idle_calls = 0
        """Calls with gradients on that were left alone because the block was in eval mode."""
        self.num_without_gradient = 0
        """Calls through which no gradient flows: nothing that they take, and no parameter, needs one."""
        self.observation: Observation | None = None
        """The latest call of the tape that was observed."""
        self.decisions: list[Traced] | None = None
        """What the plan said at every operator of the latest call that was observed."""
        self.given_up = False
        """Dynamo could not trace the block whole, so it runs in eager although it is compiled."""
        self.active = True
        self._observed = observed
        """Called after each observed forward."""
        self._state = state
        """Returns the storages of the model's parameters and buffers."""
        self._cuts = cuts
        """The smallest cuts of the programs seen so far, shared by all blocks."""
        self._offloader = offloader
        """Sends values away, for all blocks of the model."""
        self._offload = offload
        self._state_storages: frozenset[int] = frozenset()
        self._exact = exact
        """The plan is followed to the letter. See NOTE [ Barriers ]."""
        self._reissue = reissue
        """Functional collectives may run again."""
        self._cut: Cut | None = None
        self._cut_shapes: Any = None
        """The shapes of the arguments for which the cut is the smallest: for others it may hold more than plain."""
        self._nested: frozenset[int] = frozenset()
        hand_out_parameters()

    @never_compile
    def run(self, block: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block's own forward, under an engine if this call needs one.

        Where Dynamo gave the block up, it must keep out of what is inside, too: the tape could not see into it.
        """
        if not self.active or self.idle:
            return forward(block, *args, **kwargs)
        if not block.training:
            self.num_idle_calls += 1
            return forward(block, *args, **kwargs)
        inputs = list(tensors(args, kwargs))
        if not any(t.requires_grad for t in inputs) and not any(p.requires_grad for p in block.parameters()):
            self.num_without_gradient += 1
            return forward(block, *args, **kwargs)
        self._refuse(kwargs)
        if self.engine == "checkpoint":
            return self._run_twice(block, forward, args, kwargs)
        if not self.num_checked:
            return self._record(block, forward, args, kwargs, inputs, None)
        self.num_checked -= 1
        self.given_up |= getattr(block, "_compiled_call_impl", None) is not None
        self.idle = not self.num_checked and self.verdicts.keeps_everything
        self._nested = _fsdp_units(block)
        self._state_storages = self._state()
        self.observation = Observation(self._state_storages)
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
        tracer = None if observation is None else Tracer(self.verdicts, reissue=self._reissue)
        if tracer is not None:
            self.decisions = tracer.rows
        tape = Tape(
            tracer or self.verdicts,
            observation,
            inputs=inputs,
            trainable=lambda: _trainable_storages(block),
            cut=self._cut if self._cut is not None and self._cut_fits(inputs) else None,
            reissue=self._reissue,
            away=self._away(),
            exact=self._exact,
        )
        try:
            with torch.autograd.graph.saved_tensors_hooks(tape.pack, unpack):
                if observation is not None or self._nested or self.verdicts.follows_modules:
                    with Following(tape, block, self._nested), tape:
                        return forward(block, *args, **kwargs)
                with tape:
                    return forward(block, *args, **kwargs)
        except RuntimeError as error:
            if "don't yet support saved tensor hooks" in str(error):
                raise UnsupportedError(_functorch_message(self.path, "inside")) from error
            raise
        finally:
            tape.close()

    def _away(self) -> Away | None:
        if self._offloader is None or self._offload is None or not self.verdicts.offloads:
            return None
        return Away(
            self._offloader,
            min_bytes=self._offload.min_bytes,
            inputs=self.verdicts.offloads_inputs,
            state=self._state_storages,
            cpu=self._offload.to == "disk" or self._offload.copy_cpu,
        )

    def _run_twice(self, block: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run under torch's checkpoint, which runs the forward a second time in the backward pass."""
        if self.verdicts.keeps_everything:
            return forward(block, *args, **kwargs)
        observed = self.num_checked > 0
        if observed:
            self.num_checked, self.decisions = self.num_checked - 1, []
        out = run_checkpointed(self.family, forward, block, args, kwargs, self.decisions if observed else None)
        if observed:
            self._observed()
        return out

    def _cut_program(self, observation: Observation, inputs: list[Tensor]) -> None:
        """Find the smallest cut of what ran. If there is one, the next call is observed too: it will hold less."""
        by_bytes = not self.verdicts.offloads and not (self._reissue and _communicates(observation.funcs))
        if self._cut is None and by_bytes and not self._exact:
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

    def _refuse(self, kwargs: dict[str, Any]) -> None:
        if self.engine == "none":
            raise UnsupportedError(
                f"{self.path} runs in eager, and CompilerBudget is a setting of torch.compile that does nothing there. "
                "Compile the model: model.compile(), or choose a mode of actmem's own, such as actmem.Full()."
            )
        if functorch_transform() == "Grad":
            raise UnsupportedError(_functorch_message(self.path, "around"))
        if self.engine == "checkpoint":
            for name in ("past_key_values", "past_key_value", "cache_params"):
                if kwargs.get(name) is not None:
                    raise UnsupportedError(
                        f"{self.path} is given {name}, a cache that its forward writes to, and torch's checkpoint "
                        "would run that forward twice. Leave engine='checkpoint' out (the tape runs it once), or call "
                        "the model with use_cache=False."
                    )


def _communicates(funcs: list[Any]) -> bool:
    """Tell whether a program runs a collective that a replay may issue again."""
    found = (DESCRIBED.get(id(f)) for f in funcs)
    return any(operator is not None and operator.reissued for operator in found)


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


def _fsdp_units(block: nn.Module) -> frozenset[int]:
    """Return the modules inside the block that FSDP shards on their own."""
    fsdp: Any = getattr(torch.distributed, "fsdp", None)
    if fsdp is None:
        return frozenset()
    kinds = tuple(
        k for k in (getattr(fsdp, "FSDPModule", None), getattr(fsdp, "FullyShardedDataParallel", None)) if k is not None
    )
    return frozenset(id(m) for m in block.modules() if m is not block and isinstance(m, kinds))


def local(tensor: Tensor) -> Tensor:
    """Return the part of a distributed tensor that lies on this rank, or the tensor itself if it is none."""
    return getattr(tensor, "_local_tensor", tensor)


def storages_of(items: list[Tensor]) -> set[int]:
    """Return the identities of the storages on which the tensors lie."""
    found: set[int] = set()
    for t in items:
        try:
            found.add(storage_key(t.untyped_storage()))
        except (NotImplementedError, RuntimeError, ValueError):  # sparse, a wrapper without bytes of its own, or lazy
            continue
    return found
