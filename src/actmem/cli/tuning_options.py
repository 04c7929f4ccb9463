"""Options for fine-tuning: adapters, narrow weights, and what is computed in pieces of tokens."""

from __future__ import annotations

from torch import nn

from actmem.catalogue import adapt
from actmem.cli.commands import Adapting, Loading, Stepping
from actmem.errors import ModeError
from actmem.settings import Split

__all__ = ["adapted", "asked_split", "check_adapters"]


def check_adapters(asked: Loading) -> None:
    """Refuse adapters that cannot be.

    Raises:
        ModeError: the rank is not permitted, or weights are quantised and nothing would be trained.
    """
    if not isinstance(asked, Adapting):
        return
    if asked.lora is not None and asked.lora < 1:
        raise ModeError(f"--lora {asked.lora} is not permitted. Expected the rank of the adapters, such as 16.")
    if asked.quant is not None and asked.lora is None:
        raise ModeError(
            f"--quant {asked.quant} stores frozen weights, and without adapters nothing is left to train. Write "
            "--lora 16 too, or omit --quant."
        )


def adapted(model: nn.Module, asked: Loading) -> nn.Module:
    """Put adapters on a model if the options ask for them."""
    if not isinstance(asked, Adapting) or asked.lora is None:
        return model
    return adapt(model, asked.lora, quantisation=asked.quant)


def asked_split(asked: Stepping) -> Split | None:
    """Return what is to be computed in pieces of tokens; None if nothing is.

    >>> asked_split(Stepping("llama-3.1-8b", split="loss=16,mlp=8"))
    Split(loss=16, parts={'mlp': 8})
    >>> asked_split(Stepping("llama-3.1-8b", chunked_loss=True))
    Split(loss='auto')

    Raises:
        ModeError: the text is not a list of names and numbers, or the loss is named twice.
    """
    found: dict[str, int | str] = {}
    for part in (asked.split or "").split(",") if asked.split is not None else ():
        name, sign, number = (text.strip() for text in part.partition("="))
        value = "auto" if name == "loss" and number == "auto" else int(number) if number.isdecimal() else None
        if not sign or not name or value is None or name in found:
            raise ModeError(
                f"--split {asked.split}: {part!r} is not permitted. Expected names and numbers of pieces, each once: "
                "loss=16,mlp=8."
            )
        found[name] = value
    if asked.chunked_loss:
        if "loss" in found:
            raise ModeError(f"--chunked-loss and --split {asked.split} both divide the loss. Omit one of them.")
        found["loss"] = "auto"
    if not found:
        return None
    loss = found.pop("loss", None)
    return Split(loss=loss, parts=found)  # pyright: ignore[reportArgumentType] # checked by the class itself
