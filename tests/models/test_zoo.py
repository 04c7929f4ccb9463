import pytest
import torch

from actmem.structure import find_blocks
from tests.zoo import ZOO

# Llava reads the last vision layer but one, so the last one gets no gradient in plain training either.
WITHOUT_GRADIENT = ("model.vision_tower.encoder.layers.1.", "model.vision_tower.post_layernorm.")


@pytest.mark.parametrize("name", ZOO)
def test_the_blocks_of_every_model_are_found(name: str) -> None:
    case = ZOO[name]
    blocks = find_blocks(case.build(), case.blocks)
    assert len(blocks) == case.num_blocks


@pytest.mark.parametrize("name", ZOO)
def test_every_model_trains(name: str) -> None:
    case = ZOO[name]
    model = case.build()
    assert model.training
    loss = case.step(model)
    assert loss.dim() == 0 and torch.isfinite(loss)
    loss.backward()
    for path, parameter in model.named_parameters():
        if parameter.requires_grad and not path.startswith(WITHOUT_GRADIENT):
            # Half of the tests of this project compare gradients: one that is zero would agree with anything.
            assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), path
    before = [parameter.detach().clone() for parameter in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", ZOO)
def test_build_and_batch_depend_on_nothing_but_their_seeds(name: str) -> None:
    case = ZOO[name]
    torch.manual_seed(5)
    first, first_batch = case.build(), case.batch(case.build())
    torch.manual_seed(6)
    before = torch.random.get_rng_state()
    second, second_batch = case.build(), case.batch(case.build())
    assert torch.equal(torch.random.get_rng_state(), before)
    for (name, one), (_, two) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(one, two), name
    torch.testing.assert_close(first_batch, second_batch, rtol=0, atol=0)


def test_the_dropout_models_are_random_and_the_others_are_not() -> None:
    for case in ZOO.values():
        model = case.build()
        batch = case.batch(model)
        torch.manual_seed(0)
        first = case.step(model, batch)
        torch.manual_seed(1)
        second = case.step(model, batch)
        assert (not torch.equal(first, second)) == ("random" in case.tags), case.name
