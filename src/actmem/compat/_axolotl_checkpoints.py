"""axolotl's features for the checkpointed layers of transformers: wrap, offload their inputs, save selectively."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from actmem.applying import Applied, KeptTensor, Sent, can_move, unpack
from actmem.compat._axolotl_manager import Sender, check_stash
from actmem.compat._calls import apply_once
from actmem.decision_rules import Rule
from actmem.decisions import Decision
from actmem.errors import ModeError
from actmem.modes import Full, Rules
from actmem.offloading import TransferCounts
from actmem.ops import is_glob
from actmem.settings import Offload
from actmem.torchcompat import named_modules

__all__ = [
    "WINDOWED",
    "CheckpointActivationOffloadStats",
    "CheckpointHiddenStatesOffload",
    "ac_wrap_hf_model",
    "apply_selective_checkpointing",
    "get_checkpoint_hidden_states_offloading_ctx_manager",
    "selective_mode",
]

WINDOWED = ("sliding_attention", "chunked_attention")
"""Layer types in which nothing is saved unless requested."""
_PRODUCTS = "aten.mm|aten.addmm|aten.linear|aten._grouped_mm"


@dataclass
class CheckpointActivationOffloadStats:
    """What happened since the context was entered."""

    saved_tensors_seen: int = 0
    marked_tensors: int = 0
    """Number of inputs of checkpointed layers."""
    offloaded_tensors: int = 0
    restored_tensors: int = 0
    skipped_marked_tensors: int = 0
    """Inputs that were not offloaded: on the CPU, too small, or parameters."""
    offloaded_bytes: int = 0
    restored_bytes: int = 0


class CheckpointHiddenStatesOffload(contextlib.ContextDecorator):
    """Offload the inputs of transformers' checkpointed layers, and nothing else, while entered.

    `stats` counts since it was last entered. It covers all layers that derive from `GradientCheckpointingLayer`, under
    both the reentrant and the non-reentrant variant of torch's checkpoint.

    Args:
        use_pin_memory: use page-locked host memory, if there is an accelerator.
        use_streams: overlap copies with computation.
        min_offload_size: size in bytes below which tensors are not offloaded.
        max_fwd_stash_size: maximum number of inputs in flight at once; at least 1.
        max_cpu_buffer_pool_size: accepted. In axolotl it bounds what is kept for the next step; here host memory is
            reused anyway, and never exceeds what was offloaded at once.
        copy_cpu: copy tensors on the CPU to other host memory too. That saves nothing, but is useful in tests.

    Raises:
        ModeError: an argument has a value that is not permitted.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_size: int = 1024,
        max_fwd_stash_size: int = 2,
        max_cpu_buffer_pool_size: int = 64,
        *,
        copy_cpu: bool = False,
    ) -> None:
        check_stash(max_fwd_stash_size)
        if type(max_cpu_buffer_pool_size) is not int or max_cpu_buffer_pool_size < 0:
            raise ModeError(
                f"max_cpu_buffer_pool_size = {max_cpu_buffer_pool_size!r} is not permitted. Expected an int of 0 or "
                "more."
            )
        self._settings = Offload(
            to="host",
            pin=use_pin_memory,
            use_streams=use_streams,
            min_bytes=min_offload_size,
            max_in_flight=max_fwd_stash_size,
            copy_cpu=copy_cpu,
        )
        self.use_streams = use_streams
        self.stats = CheckpointActivationOffloadStats()
        self._sender = Sender(self._settings)
        self._marked: set[int] = set()
        self._entered: list[contextlib.ExitStack] = []

    @property
    def ledger(self) -> TransferCounts:
        """The bytes offloaded, fetched and dropped so far."""
        return self._sender.ledger

    def close(self) -> None:
        """Release the store, as soon as nothing is offloaded any more. Happens automatically when this object dies."""
        self._sender.close()

    def __enter__(self) -> CheckpointHiddenStatesOffload:
        self.stats = CheckpointActivationOffloadStats()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_telling_inputs_to(self._meant))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
            self._entered.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    @contextlib.contextmanager
    def _meant(self, hidden_states: Tensor) -> Generator[None]:
        """Mark a tensor while the layer that receives it runs. Its caller holds it until then, so its id is unique."""
        self.stats.marked_tensors += 1
        self._marked.add(id(hidden_states))
        try:
            yield
        finally:
            self._marked.discard(id(hidden_states))

    def _pack(self, tensor: Tensor) -> KeptTensor | _Counted:
        self.stats.saved_tensors_seen += 1
        if id(tensor) not in self._marked:
            return KeptTensor(tensor)
        self._marked.remove(id(tensor))
        if isinstance(tensor, nn.Parameter | nn.Buffer) or not can_move(tensor, self._settings):
            self.stats.skipped_marked_tensors += 1
            return KeptTensor(tensor)
        num_bytes = tensor.nbytes
        self.stats.offloaded_tensors += 1
        self.stats.offloaded_bytes += num_bytes
        return _Counted(self._sender.send(tensor), num_bytes, self.stats)

    @staticmethod
    def _unpack(packed: KeptTensor | _Counted) -> Tensor:
        if isinstance(packed, KeptTensor):
            return packed.open()
        packed.stats.restored_tensors += 1
        packed.stats.restored_bytes += packed.num_bytes
        return unpack(packed.sent)


@dataclass(frozen=True, slots=True)
class _Counted:
    """An offloaded tensor, and the statistics that count its return."""

    sent: Sent
    num_bytes: int
    stats: CheckpointActivationOffloadStats


def get_checkpoint_hidden_states_offloading_ctx_manager(
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int = 1024,
    max_fwd_stash_size: int = 2,
    max_cpu_buffer_pool_size: int = 64,
) -> CheckpointHiddenStatesOffload:
    """Return a context in which the inputs of transformers' checkpointed layers are offloaded."""
    return CheckpointHiddenStatesOffload(
        use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size, max_cpu_buffer_pool_size
    )


@contextlib.contextmanager
def _telling_inputs_to(meant: Callable[[Tensor], contextlib.AbstractContextManager[None]]) -> Generator[None]:
    """Report each input of a checkpointed layer of transformers while the layer runs.

    The layer's hooks would be too late: its `__call__` enters the checkpoint, and they run inside. So the class gets a
    different `__call__` until this context ends.
    """
    kind = _layer_class()
    original = kind.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("hidden_states")
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled() and isinstance(given, Tensor):
            with meant(given):
                return original(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = original


def ac_wrap_hf_model(model: nn.Module, **kwargs: Any) -> Applied:
    """Recompute every layer of a transformers model, and hold only its inputs.

    An `OffloadActivations` around the training step then sees only those inputs. axolotl wraps layers; actmem does not,
    and no name changes. In a model without a `GradientCheckpointingLayer`, actmem finds the blocks; axolotl leaves such
    a model unchanged.

    Raises:
        ModeError: an argument for torch's wrapper is given, but there is no wrapper.
    """
    if kwargs:
        raise ModeError(f"{', '.join(kwargs)}: has no meaning here, because there is no wrapper. Leave it out.")
    return apply_once(model, Full(), blocks=_layers_of(model))


def apply_selective_checkpointing(
    model: nn.Module,
    save: list[str] | None = None,
    save_sliding_window: bool = False,
    recompute_layer_types: list[str] | None = None,
    offload: bool = False,
    *,
    save_modules: list[str] | None = None,
    save_matmul_min_k: int | None = None,
) -> None:
    """Make `model.gradient_checkpointing_enable` use actmem, to recompute everything except what is named.

    Calling it (as the Trainer does, with `gradient_checkpointing=True`) then switches this on instead of transformers'
    own checkpointing; `gradient_checkpointing_disable` undoes it. Calling this function again changes nothing.

    Args:
        model: a transformers model.
        save: "attention", or parts of operator names such as "aten::mm". Default: attention.
        save_sliding_window: save in layers with a sliding or chunked window too.
        recompute_layer_types: other layer types that save nothing. Default: sliding_attention, chunked_attention.
        offload: offload what is saved to host memory.
        save_modules: modules whose matrix products are saved too: ends of paths, or globs.
        save_matmul_min_k: refused: actmem has no rule on the inner size of a product.

    Raises:
        ModeError: an argument has a value that is not permitted.
    """
    if getattr(model.gradient_checkpointing_enable, "_actmem_selective", False):
        return
    place = Offload(to="host", min_bytes=1024) if offload else None
    if save_matmul_min_k is not None:
        raise ModeError(
            f"save_matmul_min_k = {save_matmul_min_k!r} has no counterpart here. Name the modules instead: "
            "save_modules=['down_proj']."
        )
    layers = _layers_of(model)
    windowed = () if save_sliding_window else WINDOWED if recompute_layer_types is None else recompute_layer_types
    mode = selective_mode(save, windowed, place, [_products_of(model, name) for name in save_modules or ()])

    def gradient_checkpointing_enable(self: Any, *_: Any, **__: Any) -> None:
        self._actmem_selective_applied = apply_once(self, mode, blocks=layers)

    def gradient_checkpointing_disable(self: Any) -> None:
        applied = self.__dict__.pop("_actmem_selective_applied", None)
        if applied is not None:
            applied.remove()

    gradient_checkpointing_enable._actmem_selective = True  # pyright: ignore[reportFunctionMemberAccess]
    for function in (gradient_checkpointing_enable, gradient_checkpointing_disable):
        setattr(model, function.__name__, MethodType(function, model))


def selective_mode(
    save: Sequence[str] | None, recompute_layer_types: Sequence[str], offload: Offload | None, modules: Sequence[str]
) -> Rules:
    """Translate axolotl's selective checkpointing to rules: first the matrix products of modules, whatever their layer.

    >>> for rule in selective_mode(["attention", "aten::mm"], ["sliding_attention"], None, []).rules():
    ...     print(rule)
    Rule('recompute', layer_type='sliding_attention', op='attention')
    Rule('recompute', layer_type='sliding_attention', op='*aten.mm*')
    Rule('save', op='attention')
    Rule('save', op='*aten.mm*')
    Rule('recompute')
    """
    decision = Decision.SAVE if offload is None else Decision.OFFLOAD
    given = list(save) if save else ["attention"]
    operators = [text if text == "attention" else f"*{text.replace('::', '.')}*" for text in given]
    return Rules(
        [
            *(Rule(decision, module=glob, op=_PRODUCTS) for glob in modules),
            *(Rule("recompute", layer_type=kind, op=op) for kind in recompute_layer_types for op in operators),
            *(Rule(decision, op=op) for op in operators),
            Rule("recompute"),
        ],
        offload=offload,
    )


def _products_of(model: nn.Module, name: str) -> str:
    """Return the modules that a name refers to, as a glob. For a module with adapters, the adapted module."""
    glob = name if is_glob(name) else f"*.{name}"
    has_adapters = any(path.endswith(f"{name}.base_layer") for path, _ in named_modules(model))
    return f"{glob}.base_layer" if has_adapters else glob


def _layers_of(model: nn.Module) -> str | None:
    """Return the layers that transformers can checkpoint, as globs; None if there are none."""
    found: list[str] = []
    for path, module in named_modules(model):
        if isinstance(module, _layer_class()) and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    return ",".join(found) or None


def _layer_class() -> type[Any]:
    try:
        from transformers import GradientCheckpointingLayer
    except ImportError:
        raise ModeError(
            "this needs the layers of transformers, which is not installed: pip install transformers."
        ) from None
    return GradientCheckpointingLayer
