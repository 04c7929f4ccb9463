"""A fake step has the shapes of a real one, real integers, no bytes, and a routing that is assumed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from actmem.errors import UnsupportedError
from actmem.profiling.fake_model import Assuming, fake_batch, fake_copy
from actmem.torchcompat import FakeTensor, FakeTensorMode

CPU = torch.device("cpu")


def fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.frozen(self.embedding(ids)) * self.scale)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_fake_copy_keeps_shapes_ties_and_frozen_parameters_and_has_no_bytes(device: str) -> None:
    model = Tied().to(device)
    if device == "meta":
        model.head.weight = model.embedding.weight  # `to` makes two of them
    before = dict(model.named_parameters())
    copied = fake_copy(model, fake_mode(), CPU)
    found = dict(copied.named_parameters())
    assert {n: (p.shape, p.requires_grad) for n, p in found.items()} == {
        n: (p.shape, p.requires_grad) for n, p in before.items()
    }
    assert all(isinstance(p.data, FakeTensor) and p.device == CPU for p in found.values())
    assert isinstance(copied.scale, FakeTensor)
    assert copied.head.weight is copied.embedding.weight
    assert all(p is before[n] for n, p in model.named_parameters()), "the model itself is as it was"


def test_integers_of_a_batch_stay_real_and_floats_do_not() -> None:
    batch = {
        "ids": torch.tensor([[1, 2]]),
        "x": torch.ones(2, requires_grad=True),
        "more": (torch.tensor([True]), "text"),
    }
    found = fake_batch(batch, fake_mode(), CPU)
    assert found["ids"].tolist() == [[1, 2]]
    assert isinstance(found["x"], FakeTensor)
    assert found["x"].requires_grad
    assert found["more"][0].tolist() == [True]
    assert found["more"][1] == "text"


def route(routing: str, *, tokens: int, experts: int, chosen: int) -> Tensor:
    mode = fake_mode()
    scores = fake_batch(torch.rand(tokens, experts), mode, CPU)
    with mode, (assuming := Assuming(routing)):
        indices = scores.topk(chosen).indices
    assert assuming.routing == routing
    return indices


def test_a_balanced_router_prefers_no_expert_and_gives_no_token_the_same_one_twice() -> None:
    indices = route("balanced", tokens=4096, experts=8, chosen=2)
    assert not isinstance(indices, FakeTensor)
    assert all(len(set(row)) == 2 for row in indices.tolist())
    loads = indices.flatten().bincount(minlength=8)
    assert loads.sum() == 8192
    assert (loads - 1024).abs().max() < 100, "three standard deviations of a mean of 1024"
    assert loads[0] > 1024 < loads[-1], "where a step's peak may be, there is more than the mean"


def test_a_worst_router_sends_every_token_to_the_same_experts() -> None:
    assert route("worst", tokens=16, experts=8, chosen=2).tolist() == [[0, 1]] * 16


def test_code_that_reads_a_number_is_refused_with_the_line_to_write() -> None:
    mode = fake_mode()
    x = fake_batch(torch.ones(3), mode, CPU)
    with (
        mode,
        Assuming("balanced"),
        pytest.raises(UnsupportedError, match=r"actmem\.profile\(model, example, fake=False\)"),
    ):
        x.sum().item()


def test_code_that_reads_real_integers_runs() -> None:
    with fake_mode(), Assuming("balanced"):
        assert torch.tensor([0, 3, 0]).nonzero().tolist() == [[1]]


def test_a_recurrent_layer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"recurrent layer.*fake=False"):
        fake_copy(nn.Sequential(nn.LSTM(2, 2)), fake_mode(), CPU)
