"""Stacks are the outermost places where a model repeats a module."""

from __future__ import annotations

import torch
from torch import nn

from actmem.structure.blocks import find_stacks, is_never_called, label_of, num_parameters


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(3))


class SwinStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))


def paths(model: nn.Module) -> list[list[str]]:
    return [[path for path, _ in stack.members] for stack in find_stacks(model)]


def test_experts_inside_a_layer_are_not_a_stack_of_their_own() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()])})
    assert paths(model) == [["layers.0", "layers.1"]]
    (stack,) = find_stacks(model)
    assert (stack.path, stack.label, stack.is_leaf) == ("layers", "Layer", False)
    assert stack.num_parameters == num_parameters(model)


def test_numbered_attributes_are_a_stack() -> None:
    model = nn.Module()
    model.stem = nn.Linear(4, 4)
    model.layer1, model.layer2 = Layer(), Layer()
    assert paths(model) == [["layer1", "layer2"]]


def test_stages_and_containers_are_looked_through() -> None:
    assert paths(nn.ModuleDict({"stages": nn.ModuleList([SwinStage(), SwinStage()])})) == [
        [f"stages.{stage}.blocks.{block}" for stage in range(2) for block in range(2)]
    ]
    nested = nn.Sequential(nn.Sequential(Layer(), Layer()), nn.Sequential(Layer()))
    assert paths(nested) == [["0.0", "0.1", "1.0"]]


def test_the_stem_and_the_head_of_a_sequential_are_not_members() -> None:
    assert paths(nn.Sequential(nn.Embedding(9, 4), Layer(), Layer(), nn.Linear(4, 9))) == [["1", "2"]]


def test_a_module_that_appears_twice_is_one_member() -> None:
    shared = Layer()
    assert paths(nn.ModuleDict({"layers": nn.ModuleList([shared, Layer(), shared])})) == [["layers.0", "layers.1"]]


def test_a_list_of_single_operations_is_a_stack_of_leaves() -> None:
    (stack,) = find_stacks(nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))}))
    assert stack.is_leaf


def test_a_container_is_never_called_unless_it_has_a_forward() -> None:
    class Called(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert is_never_called(nn.ModuleList())
    assert not is_never_called(Called())
    assert not is_never_called(nn.Sequential())


def test_a_plain_sequential_is_named_by_its_children() -> None:
    assert label_of(nn.Sequential(nn.Linear(2, 2), nn.GELU())) == "Sequential(Linear, GELU)"
    assert label_of(Layer()) == "Layer"
