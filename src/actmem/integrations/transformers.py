"""A callback for the `Trainer` of transformers, and for the trainers of TRL, which derive from it.

>>> import actmem
>>> callback = ActmemCallback(actmem.Full())  # then: Trainer(..., callbacks=[callback])
>>> callback.applied is None  # until there is a trainer
True
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from torch import nn
from typing_extensions import override

from actmem.applying import device_of
from actmem.errors import ApplyError, ModeError
from actmem.integrations._managed_run import ApplyOptions, Managing, missing, planning_batch
from actmem.integrations.metrics import Metrics
from actmem.modes import Budget, Mode
from actmem.plan import Plan

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise missing("transformers", "transformers", "accelerate") from error

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["ActmemCallback"]


class ActmemCallback(Managing, TrainerCallback):
    """Train under a mode or a plan: `Trainer(..., callbacks=[ActmemCallback(actmem.Full())])`.

    The mode is applied when the trainer is created, before accelerate wraps the model, and removed when training ends.
    A `Budget` is planned when training begins, with the trainer's precision and gradient accumulation in effect, for a
    batch of the longest samples built by the trainer's own collator; `example` overrides it.
    """

    def __init__(
        self,
        mode: Mode | Plan,
        *,
        example: dict[str, Any] | None = None,
        on_metrics: Callable[[Metrics], object] | None = None,
        **options: Unpack[ApplyOptions],
    ) -> None:
        """Store the mode and its options.

        Args:
            mode: what `actmem.apply` takes.
            example: the batch that a `Budget` is planned for. Default: one built from the training data.
            on_metrics: called after each optimizer step, on every rank, with a plain dict: `found.append`, `wandb.log`.
            options: `blocks`, `scope`, `engine`, `collectives`, `loss` and `split`, as for `actmem.apply`.

        Raises:
            ModeError: an example is given for a mode that does not need one.
        """
        if example is not None and not isinstance(mode, Budget):
            raise ModeError(
                f"example is for a Budget, which is planned for a batch; {type(mode).__name__} is not. Leave it out."
            )
        super().__init__(mode, on_metrics, options)
        self._example = example

    @override
    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse settings that recompute twice, and apply the mode before the model is wrapped."""
        _refuse(args, self.mode, self._options)
        if not isinstance(self.mode, Budget) and isinstance(model := kwargs.get("model"), nn.Module):
            self._put_on(model, self.mode)

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Plan a budget; apply the mode to a model created since, or from which an earlier training removed it."""
        _refuse(args, self.mode, self._options)
        model = cast(nn.Module, kwargs["model"])
        if self._is_on(model):
            return
        if not isinstance(self.mode, Budget):
            self._put_on(model, self.mode)
            return
        example = self._example
        if example is None:
            example = planning_batch(kwargs["train_dataloader"], args.per_device_train_batch_size)
        with _in_training(model):
            self._put_on(model, _accumulating(self.mode, args), _as_trained(example, model))

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the metrics of the step."""
        self._step(state.global_step)

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the mode."""
        self._take_off()


@contextmanager
def _in_training(model: nn.Module) -> Generator[None]:
    """Plan for training mode, which the trainer switches on only at its first step."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def _accumulating(mode: Budget, args: TrainingArguments) -> Budget:
    """Count the gradients that a trainer accumulates, unless the budget specifies the number of batches itself."""
    num = args.gradient_accumulation_steps
    return replace(mode, microbatches=num) if mode.microbatches == 1 else mode


def _as_trained(example: Any, model: nn.Module) -> dict[str, Any]:
    """Return a batch as the trainer passes it to the model: on its device, with what it adds."""
    device = device_of(model)
    batch = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in dict(example).items()}
    base: Any = cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model
    takes = getattr(base, "accepts_loss_kwargs", None)
    if takes is None:
        takes = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(base.forward).parameters.values())
    if takes and isinstance(labels := batch.get("labels"), torch.Tensor):
        batch.setdefault("num_items_in_batch", (labels != -100).sum())
    if _has_fused_head(base):
        batch.setdefault("fused_lm_head", True)
    return batch


def _has_fused_head(model: nn.Module) -> bool:
    """Return whether TRL replaced the model's forward by one that computes the loss in chunks on request."""
    forward: Any = vars(model).get("forward")
    while forward is not None:
        if "fused_lm_head" in (getattr(forward, "__kwdefaults__", None) or {}):
            return True
        forward = getattr(forward, "__wrapped__", None)  # accelerate wraps it in its own
    return False


def _refuse(args: TrainingArguments, mode: Mode | Plan, options: ApplyOptions) -> None:
    """Refuse settings that would recompute twice or could not keep a budget, and name the argument to change."""
    kind = type(args).__name__
    if args.gradient_checkpointing:
        raise ApplyError(
            f"{kind}.gradient_checkpointing = True: the trainer would recompute by running the forward code twice, "
            "in addition to actmem. (It is the default of TRL's configs.) Write "
            f"{kind}(..., gradient_checkpointing=False), and the mode decides what is recomputed."
        )
    sharded: Any = args.fsdp
    config = cast("dict[str, Any]", args.fsdp_config or {})
    if sharded and config.get("activation_checkpointing"):
        raise ApplyError(
            f"{kind}.fsdp_config['activation_checkpointing'] = True: FSDP would recompute in addition to actmem. "
            "Leave it out of fsdp_config, and the mode decides what is recomputed."
        )
    if isinstance(mode, Budget) and sharded:
        raise ModeError(
            f"{kind}.fsdp = {sharded!r} cannot be combined with {mode!r}: one rank's part "
            "does not show the whole model. Plan before the trainer is created, and pass the plan: "
            "ActmemCallback(actmem.fit(model, batch, budget=..., shard=num_ranks))."
        )
    planned = isinstance(mode, Budget) or (isinstance(mode, Plan) and mode.exact)
    if planned and args.torch_compile and options.get("engine") != "tape":
        raise ModeError(
            f"{kind}.torch_compile = True cannot be combined with a budget: the compiler chooses what is alive in its "
            "graphs, so a budget cannot be kept there. Keep the blocks out of them: ActmemCallback(..., "
            "engine='tape'); or leave torch_compile out; or name a mode such as Full()."
        )
