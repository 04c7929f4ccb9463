"""The names of axolotl and TRL offload as they do there, in a real Trainer too; and the losses are those of plain."""

import gc
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from actmem import ModeError
from actmem.compat.axolotl import (
    ActivationOffloadingMixin,
    NoOpManager,
    OffloadActivations,
    get_act_offloading_ctx_manager,
    get_lora_act_offloading_ctx_manager,
)
from tests.compat.training import REQUIRED, parameters_of
from tests.zoo import VOCAB, ZOO

SEED = {
    "model": ("any", REQUIRED),
    "use_pin_memory": ("any", True),
    "use_streams": ("any", True),
    "min_offload_size": ("any", 1024),
    "max_fwd_stash_size": ("any", 5),
    "warn_if_no_head": ("any", True),
}

VALUES = (True, "legacy", "disk", "hidden_states")


@dataclass
class Arguments(TrainingArguments):
    activation_offloading: Any = False
    activation_offloading_directory: str | None = None
    activation_offloading_copy_cpu: bool = False


class Plain(Trainer):
    pass


class Offloading(ActivationOffloadingMixin, Trainer):
    pass


class Sentences(Dataset):
    """A few sentences, some longer than others."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(3, VOCAB, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


def train(folder: Path, name: str, trainer: type[Trainer], **given: Any) -> tuple[list[float], dict[str, Tensor], Any]:
    """Train a tiny model for two steps of two microbatches; return losses, parameters and the trainer."""
    args = Arguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        dataloader_pin_memory=False,
        **given,
    )
    model = ZOO[name].build()
    made = trainer(model=model, args=args, train_dataset=Sentences())
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}, made


@pytest.fixture(autouse=True)
def quiet_trainer() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="accelerate|transformers|torch.utils.data")
        yield


PLAIN: dict[str, Any] = {}


def plain(folder: Path, name: str) -> tuple[list[float], dict[str, Tensor]]:
    if name not in PLAIN:
        PLAIN[name] = train(folder, name, Plain)[:2]
    return PLAIN[name]


def sent_bytes(trainer: Any) -> int:
    if trainer.activation_offload_applied is not None:
        moved = trainer.activation_offload_applied.report().moved
        return 0 if moved is None else moved.out_bytes
    return trainer.activation_offload_context.ledger.out_bytes


@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("name", ["llama", "llama_lora"])
def test_a_trainer_reaches_the_losses_and_weights_of_plain_training(name: str, value: Any, tmp_path: Path) -> None:
    losses, weights = plain(tmp_path, name)
    place = tmp_path / "away"
    place.mkdir()
    more = {"activation_offloading_directory": str(place)} if value == "disk" else {}
    got_losses, got, trainer = train(
        tmp_path, name, Offloading, activation_offloading=value, activation_offloading_copy_cpu=True, **more
    )
    assert len(losses) == 2 == len(set(losses))
    assert got_losses == losses
    assert [n for n in weights if not torch.equal(weights[n], got[n])] == []
    assert sent_bytes(trainer) > 0, "nothing was moved"
    assert (list(place.iterdir()) != []) is (value == "disk")
    del trainer
    gc.collect()
    assert list(place.iterdir()) == [], "the file goes with the trainer"
    assert not [t.name for t in threading.enumerate() if t.name.startswith("actmem")]


@pytest.mark.parametrize("value", [True, "hidden_states", False], ids=str)
def test_on_a_cpu_there_is_nowhere_to_go_and_training_is_as_it_was(value: Any, tmp_path: Path) -> None:
    losses, weights = plain(tmp_path, "llama")
    got_losses, got, trainer = train(tmp_path, "llama", Offloading, activation_offloading=value)
    assert got_losses == losses
    assert all(torch.equal(weights[n], got[n]) for n in weights)
    if value == "hidden_states":
        assert trainer.activation_offload_applied.report().recomputed_bytes > 0, "but blocks are recomputed"
    if value:
        assert sent_bytes(trainer) == 0


@pytest.mark.parametrize("value", [pytest.param(True, marks=pytest.mark.slow), "hidden_states"], ids=str)
def test_with_the_trainers_own_checkpointing_the_inputs_of_its_regions_are_sent(value: Any, tmp_path: Path) -> None:
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    losses, weights, _ = train(tmp_path, "llama", Plain, **checkpointing)
    got_losses, got, trainer = train(
        tmp_path,
        "llama",
        Offloading,
        activation_offloading=value,
        activation_offloading_copy_cpu=True,
        **checkpointing,
    )
    assert got_losses == losses
    assert all(torch.equal(weights[n], got[n]) for n in weights)
    num_forwards, hidden_bytes = 4, 2 * 12 * 32 * 4
    assert sent_bytes(trainer) >= num_forwards * 3 * hidden_bytes, "three blocks"
    assert sent_bytes(trainer) <= num_forwards * 8 * hidden_bytes, "and little else"


@pytest.mark.parametrize("value", ["host", "Disk", 1, 0, "true"])
def test_a_value_that_is_not_known_is_refused_before_training(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModeError, match=r"activation_offloading = .* Permitted: True, 'legacy', 'disk'"):
        train(tmp_path, "llama", Offloading, activation_offloading=value)


def test_a_trainer_whose_arguments_say_nothing_is_a_plain_trainer(tmp_path: Path) -> None:
    model = ZOO["llama"].build()
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    trainer = Offloading(model=model, args=args, train_dataset=Sentences())
    assert trainer.activation_offload_applied is None
    with trainer.activation_offload_context as entered:
        assert entered is None


# ---------------------------------------------------------------- the manager


def step(name: str, around: Any) -> tuple[dict[str, Tensor], nn.Module]:
    case = ZOO[name]
    model = case.build()
    batch = case.batch(model)
    manager = around(model)
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        with manager:
            case.step(model, batch).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, manager


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("name", ["llama", "llama_lora", "gpt2_dropout"])
def test_the_manager_changes_no_gradient_and_moves_what_it_says(name: str, streams: bool) -> None:
    wanted, _ = step(name, lambda model: NoOpManager())
    got, manager = step(name, lambda m: get_act_offloading_ctx_manager(m, use_streams=streams, copy_cpu=True))
    assert [n for n in wanted if not torch.equal(wanted[n], got[n])] == []
    assert manager.ledger.out_bytes == manager.ledger.back_bytes + manager.ledger.dropped_bytes > 0
    manager.close()


def test_the_parameters_and_defaults_are_those_of_the_other_systems() -> None:
    assert parameters_of(get_lora_act_offloading_ctx_manager) == SEED
    found = parameters_of(get_act_offloading_ctx_manager)
    assert {n: p for n, p in found.items() if p[0] == "any"} == SEED
    own = {n: p for n, p in parameters_of(OffloadActivations).items() if p[0] == "any"}
    assert own == {n: p for n, p in SEED.items() if n not in ("model", "warn_if_no_head")}


def test_the_manager_is_a_decorator() -> None:
    model = ZOO["llama"].build()
    manager = get_lora_act_offloading_ctx_manager(model)
    assert isinstance(manager, OffloadActivations)
    manager = get_act_offloading_ctx_manager(model, copy_cpu=True)

    @manager
    def training_step() -> None:
        ZOO["llama"].step(model).backward()

    training_step()
    before = manager.ledger.out_bytes
    training_step()
    assert manager.ledger.out_bytes == 2 * before > 0
    manager.close()


def test_a_region_in_a_no_op_manager_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    with get_act_offloading_ctx_manager(model, warn_if_no_head=False, copy_cpu=True) as manager:
        with NoOpManager():
            model(torch.randn(16, 64)).sum().backward()
        assert manager.ledger.out_bytes == 0
        model(torch.randn(16, 64)).sum().backward()
        assert manager.ledger.out_bytes > 0
    manager.close()


class Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("copy_cpu", [True, False])
def test_a_model_without_an_output_head_is_warned_of_once_and_only_if_asked(copy_cpu: bool) -> None:
    with pytest.warns(UserWarning, match="no output head was found in Headless"):
        get_act_offloading_ctx_manager(Headless(), copy_cpu=copy_cpu).close()
    get_act_offloading_ctx_manager(Headless(), copy_cpu=copy_cpu, warn_if_no_head=False).close()


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.liger_mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.lm_head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.liger_mlp(x).tanh())


def test_fused_modules_are_left_alone_and_keep_no_hook() -> None:
    model = Fused()
    manager = get_act_offloading_ctx_manager(model, copy_cpu=True, min_offload_size=0)
    with manager:
        model(torch.randn(16, 64)).sum().backward()
    assert manager.ledger.out_bytes == 16 * 64 * 4, "the result of tanh, which lies outside"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    manager.close()


@pytest.mark.parametrize("size", [0, -1, 1.5, None])
def test_a_stash_that_holds_nothing_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=r"max_fwd_stash_size = .* Expected an int of 1 or more"):
        get_lora_act_offloading_ctx_manager(ZOO["llama"].build(), max_fwd_stash_size=size)


def test_other_bad_values_are_refused_on_a_cpu_too() -> None:
    for bad in ({"min_offload_size": -1}, {"use_streams": "yes"}, {"to": "gpu"}):
        with pytest.raises(ModeError, match="is not"):
            get_act_offloading_ctx_manager(ZOO["llama"].build(), **bad)


def saved_by(model: nn.Module, manager: Any, x: Tensor) -> int:
    model.zero_grad()
    with manager:
        loss = model(x).sum()
    loss.backward()
    out_bytes = manager.ledger.out_bytes
    manager.close()
    return out_bytes


@pytest.mark.parametrize("frozen", [False, True])
def test_a_manager_without_a_model_sends_activations_and_leaves_parameters(frozen: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model[2].weight.requires_grad_(not frozen)
    x = torch.randn(16, 64)
    model(x).sum().backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    sent = saved_by(model, OffloadActivations(copy_cpu=True), x)
    assert all(torch.equal(p.grad, wanted[n]) for n, p in model.named_parameters() if n in wanted)
    each = 16 * 64 * 4
    assert sent == 2 * each, "the input and the result of tanh, and no weight of 16 KiB"


def test_a_manager_without_a_model_has_nothing_to_do_on_a_cpu() -> None:
    assert saved_by(nn.Linear(64, 64), OffloadActivations(), torch.randn(16, 64)) == 0


def test_parameters_that_were_named_stay_even_where_they_cannot_be_told_from_activations() -> None:
    weight = torch.randn(64, 64)  # as of a shard that FSDP has gathered: neither a Parameter nor a view of one
    manager = OffloadActivations(copy_cpu=True)
    manager.param_storages = {weight.untyped_storage().data_ptr()}
    x = torch.randn(16, 64, requires_grad=True)
    with manager:
        (x @ weight).sum().backward()
    assert manager.ledger.out_bytes == 0
    model = nn.Linear(64, 64)
    manager.update_model_params(model)
    assert manager.param_storages == {p.untyped_storage().data_ptr() for p in model.parameters()}
    manager.close()


@pytest.mark.parametrize("streams", [True, False])
def test_a_manager_says_whether_it_copies_beside_the_computation(streams: bool) -> None:
    assert get_act_offloading_ctx_manager(ZOO["llama"].build(), use_streams=streams).use_streams is streams


class Tied:
    """Not a module, as in torchtune: what it holds is the head."""

    def __init__(self, linear: nn.Module) -> None:
        self.linear = linear


class TiedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, head = nn.Linear(64, 64), nn.Linear(64, 64)
        self.output = Tied(head)

    def forward(self, x: Tensor) -> Tensor:
        return self.output.linear(self.body(x).tanh()).square()


def test_a_head_is_found_in_what_is_not_a_module_itself() -> None:
    model = TiedOutput()
    manager = get_act_offloading_ctx_manager(model, copy_cpu=True)
    assert saved_by(model, manager, torch.randn(16, 64)) == 2 * 16 * 64 * 4, "the input and the result of tanh"


def test_the_mixin_is_a_trainer_by_itself(tmp_path: Path) -> None:
    losses, _ = plain(tmp_path, "llama")
    got, _, trainer = train(
        tmp_path, "llama", ActivationOffloadingMixin, activation_offloading=True, activation_offloading_copy_cpu=True
    )
    assert got == losses and sent_bytes(trainer) > 0
