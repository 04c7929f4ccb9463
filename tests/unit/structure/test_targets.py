from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from actmem.decision_rules import TARGETS
from actmem.structure import ROLES, find_blocks, roles
from tests.zoo import ZOO
from tests.zoo_titan import TransformerBlock

# What is found in which model: tests/models/test_targets_found.py.

DENSE = {
    "norm": ("attention_norm", "ffn_norm"),
    "attention": ("attention",),
    "attn_proj": ("attention",),
    "mlp": ("feed_forward",),
}


def dense_block() -> TransformerBlock:
    return TransformerBlock(dim=8, heads=2, kv_heads=2, ffn=8)


def below(prefix: str, found: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {role: tuple(f"{prefix}.{path}" for path in paths) for role, paths in found.items()}


def test_every_target_of_a_plan_is_a_role_and_has_a_meaning() -> None:
    assert ROLES.keys() == set(TARGETS) and all(ROLES.values())


@pytest.mark.parametrize("case", ZOO)
def test_every_role_is_a_known_one_and_every_path_a_module_of_the_block(case: str) -> None:
    for block in find_blocks(ZOO[case].build()):
        found = roles(block.module)
        assert "norm" in found and found.keys() <= ROLES.keys()
        for role_paths in found.values():
            assert role_paths and all(block.module.get_submodule(path) for path in role_paths)


def test_the_activation_of_the_experts_has_the_paths_of_the_experts() -> None:
    found = roles(TransformerBlock(dim=8, heads=2, kv_heads=2, ffn=8, sparse=True))
    assert found["moe_act"] == found["routed_experts"] == ("moe.experts",)


def test_a_norm_of_weights_is_no_norm_of_activations() -> None:
    block = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.LayerNorm(2))
    assert roles(block) == {"norm": ("1",)}


def test_a_block_without_any_role_has_none() -> None:
    assert roles(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == {}


def test_a_block_that_is_itself_the_dense_part_has_the_empty_path() -> None:
    class FeedForward(nn.Sequential):
        pass

    assert roles(FeedForward(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 2))) == {"mlp": ("",)}


def test_an_activation_module_beside_two_halves_belongs_to_the_dense_part() -> None:
    block = nn.TransformerEncoderLayer(4, 2, 8, activation=nn.GELU())
    assert set(roles(block)["mlp"]) == {"linear1", "activation", "linear2"}


def test_a_short_convolution_is_a_part_of_a_mixer_and_no_mixer() -> None:
    class ShortConvolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 3, groups=4)

    class GatedDeltaNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_proj = nn.Linear(4, 8)
            self.short = ShortConvolution()
            self.out_proj = nn.Linear(8, 4)

    assert roles(nn.Sequential(GatedDeltaNet(), ShortConvolution())) == {"linear_attn": ("0",)}


# ---------------------------------------------------------------- wrappers and adapters


def test_a_compiled_block_has_its_roles_under_the_prefix() -> None:
    assert roles(torch.compile(dense_block(), backend="eager")) == below("_orig_mod", DENSE)


def test_compiled_parts_have_their_roles_at_their_own_paths() -> None:
    block = dense_block()
    block.attention = torch.compile(block.attention, backend="eager")
    block.ffn_norm = torch.compile(block.ffn_norm, backend="eager")
    block.feed_forward.w1 = torch.compile(block.feed_forward.w1, backend="eager")
    assert roles(block) == DENSE


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_data_parallel_hides_no_role() -> None:
    assert roles(nn.parallel.DistributedDataParallel(dense_block())) == below("module", DENSE)


@pytest.mark.usefixtures("alone")
def test_sharding_hides_no_role() -> None:
    block = dense_block()
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.fsdp.fully_shard(block.attention, mesh=mesh)
    dist.fsdp.fully_shard(block, mesh=mesh)
    assert roles(block) == DENSE


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:.*FSDP:")  # the first form of FSDP is deprecated, and wants an accelerator
def test_the_first_form_of_sharding_hides_no_role() -> None:
    block = dense_block()
    block.feed_forward = dist.fsdp.FullyShardedDataParallel(block.feed_forward, device_id=torch.device("cpu"))
    assert roles(block) == DENSE


def test_adapters_hide_no_role_and_add_none() -> None:
    from peft import LoraConfig, get_peft_model

    plain = ZOO["mixtral"].build()
    expected = [roles(block.module) for block in find_blocks(plain)]
    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj"],
        modules_to_save=["input_layernorm"],
    )
    assert [roles(block.module) for block in find_blocks(get_peft_model(plain, config))] == expected
