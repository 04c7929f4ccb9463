"""Find the output head of a model: what its activations pass last, and backward needs first."""

from torch import nn

from actmem.structure.identity import unwrapped

__all__ = ["find_head"]

_HEADS = (
    *("output.linear", "output", "lm_head", "decoder.output", "decoder.lm_head", "embed_out", "score", "classifier"),
    *("head", "final_layer_norm", "ln_f"),
)
"""Paths from the model itself, better ones first."""

_INSIDE = ("base_model", "model")
"""Where wrappers that add something of their own, such as PEFT's, keep the model."""


def find_head(model: nn.Module) -> nn.Module | None:
    """Return the output head of a model, looking through wrappers; None where none is found.

    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body, self.lm_head = nn.Linear(2, 2), nn.Linear(2, 4)
    >>> find_head(Model())
    Linear(in_features=2, out_features=4, bias=True)
    """
    seen: set[int] = set()
    inner: nn.Module | None = unwrapped(model)
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        for path in _HEADS:
            found = _at(inner, path)
            if found is not None:
                return found
        children = dict(inner.named_children())
        inner = next((unwrapped(children[name]) for name in _INSIDE if name in children), None)
    return None


def _at(model: nn.Module, path: str) -> nn.Module | None:
    # Not get_submodule: what ties an output to the embedding may be a plain object that holds the module.
    found: object = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None
