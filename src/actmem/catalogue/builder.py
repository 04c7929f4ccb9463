"""Build models of the catalogue, and examples for them."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from actmem.catalogue.decoder import CausalLM
from actmem.catalogue.layers import Factory, RMSNorm
from actmem.catalogue.model_configs import CONFIGS, Config, VisionConfig, find, scaled
from actmem.catalogue.vit import ImageClassifier
from actmem.errors import ModeError

__all__ = ["build", "example", "names"]

_STD = 0.02
_SEQUENCE = 8192


def names() -> tuple[str, ...]:
    """Return the names of the models in the catalogue.

    >>> len(names()), "deepseek-v3" in names()
    (10, True)
    """
    return tuple(CONFIGS)


def build(
    name: str | Config,
    *,
    layers: int | None = None,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
    scale: float | None = None,
) -> nn.Module:
    """Build a model of the catalogue, on the meta device or with random weights.

    Called with `example(name)`, the model returns an object with `loss` and `logits`.

    Args:
        name: one of `names()`, or a config, such as `tiny(name)`.
        layers: number of layers to build, starting with the first. Default: all.
        device: device of the parameters; on "meta" nothing is allocated and no weights are drawn.
        dtype: dtype of all parameters.
        scale: factor, at most 1, to make the model narrower by; see `configs.scaled`.

    Raises:
        ModeError: there is no such model, it does not have that many layers, or the scale is not above 0 and at most 1.

    >>> model = build("llama-3.1-405b")
    >>> len(model.model.layers), sum(p.numel() for p in model.parameters())
    (126, 405853388800)
    >>> model = build("mixtral-8x7b", layers=2, scale=1 / 64, device="cpu", dtype=torch.float32)
    >>> model(**example("mixtral-8x7b", sequence=4, device="cpu")).logits.shape
    torch.Size([1, 4, 32000])
    """
    config = _changed(find(name) if isinstance(name, str) else name, layers, scale)
    factory = Factory(device=torch.device(device), dtype=dtype)
    model = ImageClassifier(config, factory) if isinstance(config, VisionConfig) else CausalLM(config, factory)
    if factory["device"].type != "meta":
        _draw(model)
    return model


def example(
    name: str | Config, *, batch: int = 1, sequence: int | None = None, device: str | torch.device = "meta"
) -> dict[str, Tensor]:
    """Return a batch for a model of the catalogue, to call it as `model(**example(name))`.

    Args:
        name: as for `build`.
        batch: number of sequences or images.
        sequence: tokens per sequence. Default: 8192. Not for images, whose size is fixed.
        device: device of the batch; except on "meta", the values are random, and always the same.

    Raises:
        ModeError: there is no such model, a number is below 1, or a sequence is given for images.

    >>> {key: tuple(value.shape) for key, value in example("qwen3-8b", batch=2).items()}
    {'input_ids': (2, 8192), 'labels': (2, 8192)}
    >>> {key: tuple(value.shape) for key, value in example("vit-l").items()}
    {'pixel_values': (1, 3, 224, 224), 'labels': (1,)}
    """
    config = find(name) if isinstance(name, str) else name
    _check_count("batch", batch)
    if isinstance(config, VisionConfig):
        if sequence is not None:
            raise ModeError(
                f"sequence = {sequence!r} was given for {config.name}, which reads images of {config.image_size} x "
                f"{config.image_size}. Leave sequence out."
            )
        shape = (batch, 3, config.image_size, config.image_size)
        pixels, labels = _random(shape, None, device), _random((batch,), config.num_classes, device)
        return {"pixel_values": pixels, "labels": labels}
    length = _SEQUENCE if sequence is None else sequence
    _check_count("sequence", length)
    tokens = _random((batch, length), config.vocab_size, device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _changed(config: Config, layers: int | None, scale: float | None) -> Config:
    if layers is not None:
        _check_count("layers", layers)
        if layers > config.num_layers:
            raise ModeError(f"layers = {layers} is more than {config.name} has: {config.num_layers}.")
        config = replace(config, num_layers=layers)
    if scale is None:
        return config
    if not 0 < scale <= 1:
        raise ModeError(f"scale = {scale!r} is not permitted. Expected a factor above 0 and at most 1, such as 0.25.")
    return scaled(config, scale)


def _check_count(what: str, value: int) -> None:
    if value < 1:
        raise ModeError(f"{what} = {value!r} is not permitted. Expected a whole number of at least 1.")


def _random(shape: tuple[int, ...], end: int | None, device: str | torch.device) -> Tensor:
    """Draw integers below `end`, or floats if there is none; the same ones each time."""
    if torch.device(device).type == "meta":
        return torch.empty(shape, dtype=torch.float32 if end is None else torch.int64, device="meta")
    generator = torch.Generator().manual_seed(0)
    if end is None:
        return torch.randn(shape, generator=generator).to(device)
    return torch.randint(end, shape, generator=generator).to(device)


def _draw(model: nn.Module) -> None:
    """Initialise all weights of a model in place: norms as the identity, everything else from a normal distribution."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(0.0 if module.plus_one else 1.0)
            elif not isinstance(module, nn.LayerNorm):
                for parameter in module.parameters(recurse=False):
                    parameter.normal_(std=_STD)
            for buffer in module.buffers(recurse=False):
                buffer.zero_()
