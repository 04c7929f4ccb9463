import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import actmem
from actmem import Full, Plan, Rule, Rules, SaveEverything, Selective, SelfCheckError, Targets
from actmem.applying import applied_block
from actmem.engine.tape import Tape
from tests.zoo import ZOO, TitanLike


def titan() -> nn.Module:
    torch.manual_seed(0)
    return TitanLike()


def step(model: nn.Module) -> Tensor:
    loss = model(torch.arange(24).view(2, 12)).square().mean()
    loss.backward()
    return loss


def test_the_plan_names_mode_blocks_rules_and_model() -> None:
    with actmem.apply(titan(), Full(every=2)) as applied:
        assert applied.plan.mode == "Full(every=2)"
        assert applied.plan.blocks == ("layers.0", "layers.1", "layers.2")
        assert applied.plan.rules == Full(every=2).rules()
        assert repr(applied) == "<Applied Full(every=2) on 3 blocks>"


def test_a_plan_can_be_applied_as_it_is() -> None:
    plan = Plan(Targets(["norm"]).rules(), *identity(titan()), "by hand")
    with actmem.apply(model := titan(), plan) as applied:
        step(model)
        assert applied.plan is plan
        assert {row.module for kind in applied.report().kinds for row in kind.rows if row.replayed} == {
            "attention_norm",
            "ffn_norm",
        }


def identity(model: nn.Module) -> tuple[tuple[str, ...], str]:
    with actmem.apply(model, Full()) as applied:
        return applied.plan.blocks, applied.plan.fingerprint


def test_a_plan_fits_models_built_alike_and_no_others() -> None:
    blocks, fingerprint = identity(titan())
    torch.manual_seed(9)
    assert identity(TitanLike()) == (blocks, fingerprint), "the values of weights do not count"
    assert identity(TitanLike(ffn=64))[1] != fingerprint
    assert identity(TitanLike(layers=4))[1] != fingerprint
    other = titan()
    other.layers["1"].ffn_norm.double()
    assert identity(other)[1] != fingerprint


def test_full_takes_the_layers_it_names() -> None:
    for mode, expected in ((Full(every=2), {"0", "2"}), (Full(first=1), {"1", "2"}), (Full(every=2, first=1), {"1"})):
        with actmem.apply(model := titan(), mode) as applied:
            step(model)
            replayed = {p for k in applied.report().kinds for p in k.paths if any(r.replayed for r in k.rows)}
        assert replayed == {f"layers.{index}" for index in expected}, mode


def test_a_rule_reaches_the_modules_it_names_and_all_below() -> None:
    mode = Rules([Rule("recompute", module="layers.1.feed_forward"), Rule("save")])
    with actmem.apply(model := titan(), mode) as applied:
        step(model)
        (kind,) = (k for k in applied.report().kinds if any(r.replayed for r in k.rows))
    assert kind.paths == ("layers.1",)
    assert {row.module.split(".")[0] for row in kind.rows if row.replayed} == {"feed_forward"}


def test_small_values_can_be_left_saved() -> None:
    mode = Rules([Rule("recompute", min_bytes=4608), Rule("save")])
    with actmem.apply(model := titan(), mode) as applied:
        step(model)
        rows = [row for kind in applied.report().kinds for row in kind.rows]
    assert {row.num_bytes for row in rows if row.decision == "recompute"} == {2 * 12 * 48 * 4}
    assert all(row.num_bytes < 4608 for row in rows if row.decision == "save")


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """List the tapes that were made, in order."""
    made: list[Tape] = []

    class Counted(Tape):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(applied_block, "Tape", Counted)
    return made


def test_evaluation_runs_no_tape(tapes: list[Tape]) -> None:
    model = titan()
    ids = torch.arange(24).view(2, 12)
    with actmem.apply(model, Full()):
        with torch.no_grad():
            expected = model(ids)
        with torch.inference_mode():
            assert torch.equal(model(ids), expected)
        assert torch.equal(model.eval()(ids), expected)
        assert len(tapes) == 0
        model.train()
        step(model)
        assert len(tapes) == 3


def test_saving_everything_runs_no_tape_after_the_step_that_its_report_observed(tapes: list[Tape]) -> None:
    model = titan()
    with actmem.apply(model, SaveEverything()) as applied:
        for _ in range(3):
            step(model)
        assert len(tapes) == 3
        assert applied.report().plain_bytes > 0


def test_the_first_call_is_observed_and_check_replay_has_more_observed() -> None:
    model = titan()
    with actmem.apply(model, Full()) as applied:
        step(model)
        first = [script.observation for script in applied._runners]
        step(model)
        assert [script.observation for script in applied._runners] == first
        applied.check_replay(2)
        step(model)
        second = [script.observation for script in applied._runners]
        assert all(a is not b for a, b in zip(first, second, strict=True))
        step(model)
        assert [script.num_checked for script in applied._runners] == [0, 0, 0]


class Hidden(nn.Module):
    """Write into a value through memory that no operator touches, as a kernel unknown to torch would."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.hides = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        if self.hides:
            y.detach().numpy()[:] = 1
        return y.exp()


def test_a_replay_with_other_bits_is_an_error_that_names_the_operator_while_it_is_checked() -> None:
    model = nn.Sequential(Hidden(), Hidden())
    with actmem.apply(model, Full()):
        loss = model(torch.ones(2, 4)).sum()
        with pytest.raises(SelfCheckError, match=r"aten\.\w+"):
            loss.backward()
    for block in model:
        block.hides = False
    with actmem.apply(model, Full()) as applied:
        model(torch.ones(2, 4)).sum().backward()
        for block in model:
            block.hides = True
        applied.check_replay()
        loss = model(torch.ones(2, 4)).sum()
        with pytest.raises(SelfCheckError):
            loss.backward()


@pytest.mark.parametrize("name", ["torchtitan_like", "gpt2_dropout", "resnet"])
def test_nothing_outlives_a_step_even_without_the_garbage_collector(name: str) -> None:
    case = ZOO[name]
    model = case.build()
    batch = case.batch(model)
    with actmem.apply(model, Selective(save=["attention", "matmul", "convolution"])):
        case.step(model, batch).backward()
        model.zero_grad()
        gc.collect()
        gc.disable()
        try:

            def live() -> int:
                return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

            before = live()
            for _ in range(3):
                case.step(model, batch).backward()
                model.zero_grad()
            case.step(model, batch)  # and a graph that is dropped
            assert live() == before
        finally:
            gc.enable()


def test_a_handle_says_whether_its_plan_is_still_applied() -> None:
    applied = actmem.apply(titan(), Full())
    assert applied.is_on
    applied.remove()
    assert not applied.is_on


def test_a_frozen_block_on_inputs_without_gradients_runs_no_tape(tapes: list[Tape]) -> None:
    model = titan()
    model.tok_embeddings.requires_grad_(False)
    model.layers["0"].requires_grad_(False)
    with actmem.apply(model, Full()) as applied:
        step(model)
        assert len(tapes) == 2
        assert applied.report().unobserved == ("layers.0",)


class CountingTitan(TitanLike):
    """Counts how often somebody goes through all parameters."""

    num_readings = 0

    def parameters(self, recurse: bool = True) -> Any:
        self.num_readings += 1
        return super().parameters(recurse)


def test_the_first_step_reads_the_state_of_the_model_once_and_not_for_each_block() -> None:
    with actmem.apply(model := CountingTitan(layers=6), Full()) as applied:
        model.num_readings = 0
        step(model)
        assert model.num_readings == 1
        step(model)
        assert model.num_readings == 1, "nothing is observed"
        applied.check_replay()
        step(model)
        assert model.num_readings == 2, "it may have changed since"


def test_parameters_that_get_new_storages_block_by_block_are_still_the_models_state() -> None:
    """As where a library gathers the shards of a block just before it runs, and frees them after it."""

    def gather(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()

    model = titan()
    with actmem.apply(model, Full()) as applied:
        for block in model.layers.values():
            block.register_forward_pre_hook(gather)
        step(model)
        held = {row.op for kind in applied.report().kinds for row in kind.rows if row.decision == "input"}
        assert held == {"input"}
        listed = [row for kind in applied.report().kinds for row in kind.rows if row.op == "parameter"]
        assert not listed, "the report lists activations only"
    plain = titan()
    with actmem.apply(plain, Full()) as applied_to_plain:
        step(plain)
        assert applied_to_plain.report().held_bytes == applied.report().held_bytes


class TypedBlock(nn.Module):
    """Counts how often somebody asks for its layer type."""

    num_asked = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @property
    def layer_type(self) -> str:
        TypedBlock.num_asked += 1
        return "full_attention"

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


def test_a_plan_that_names_no_layer_types_does_not_ask_for_them() -> None:
    model = nn.Sequential(*[TypedBlock() for _ in range(3)])
    TypedBlock.num_asked = 0
    actmem.apply(model, Full()).remove()
    assert TypedBlock.num_asked == 0
    actmem.apply(model, Rules([Rule("recompute", layer_type="full*"), Rule("save")])).remove()
    assert TypedBlock.num_asked > 0


class Seen(TorchDispatchMode):
    """Lists the operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_self_check_of_the_first_forward_pass_is_hidden_from_other_dispatch_modes() -> None:
    with actmem.apply(model := titan(), Full()):
        seen: list[list[str]] = []
        for _ in range(3):
            with Seen() as mode:
                loss = model(torch.arange(24).view(2, 12)).square().mean()
            loss.backward()
            seen.append(mode.names)
    assert seen[0] == seen[1] == seen[2]
    assert "aten.view.dtype" not in seen[0]
