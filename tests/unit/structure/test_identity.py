import copy

import pytest
import torch
from torch import nn

from actmem.structure import find_blocks, fingerprint, plain_path
from tests.zoo import ZOO


def of(model: nn.Module, pattern: str | None = None) -> str:
    return fingerprint(model, find_blocks(model, pattern))


def test_the_fingerprint_ignores_weights_and_wrappers() -> None:
    model = ZOO["torchtitan_like"].build()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.output.weight.mul_(2)
    assert of(model) == of(other) == of(torch.compile(model, backend="eager")) == of(nn.DataParallel(model))
    assert of(torch.compile(nn.DataParallel(model), backend="eager")) == of(model)


def test_the_fingerprint_sees_names_shapes_dtypes_and_blocks() -> None:
    model = nn.Sequential(*[nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2)])
    named = nn.ModuleDict({str(i + 1): nn.TransformerEncoderLayer(4, 2, 8) for i in range(2)})
    wide = nn.Sequential(*[nn.TransformerEncoderLayer(4, 2, 16) for _ in range(2)])
    prints = {of(model), of(named), of(wide), of(copy.deepcopy(model).double()), of(model, "0"), of(model, "1")}
    assert len(prints) == 6


def test_a_lazy_parameter_has_a_fingerprint_too() -> None:
    lazy = nn.Sequential(nn.Sequential(nn.LazyLinear(4)), nn.Sequential(nn.LazyLinear(4)))
    assert of(lazy) == of(copy.deepcopy(lazy))


@pytest.mark.parametrize("path", ["", "module", "module.weight", "layers.module.bias"])
def test_a_name_that_users_choose_too_is_kept(path: str) -> None:
    assert plain_path(nn.Sequential(), path) == path
