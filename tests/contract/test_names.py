"""An applied model is the model it was: names, keys, classes, copies; and `remove` leaves nothing behind."""

import copy
import inspect
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem import ApplyError, Full, Plan, Selective
from tests.zoo import ZOO, Case

NAMES = ["llama", "llama_lora", "t5", "resnet", "transformer_encoder", "torchtitan_like"]


def description(model: nn.Module) -> dict[str, Any]:
    return {
        "parameters": [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)],
        "buffers": [(name, id(b)) for name, b in model.named_buffers()],
        "modules": [(name, id(m)) for name, m in model.named_modules()],
        "state": [(key, value.data_ptr()) for key, value in model.state_dict().items()],
        "own attributes": [(name, sorted(vars(m))) for name, m in model.named_modules()],
        "hooks": [(name, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()],
        "class names": [(type(m).__name__, type(m).__qualname__, type(m).__module__) for m in model.modules()],
        "signatures": [inspect.signature(m.forward) for m in model.modules() if not isinstance(m, nn.ModuleList)],
        "text": str(model),
    }


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def gradients(case: Case, model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model.zero_grad()
    case.step(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("name", NAMES)
def test_apply_and_a_step_and_remove_change_no_name_key_hook_or_attribute(name: str) -> None:
    case = ZOO[name]
    model = case.build()
    case.step(model).backward()
    before, original = description(model), classes(model)
    applied = actmem.apply(model, Full())
    assert description(model) == before
    case.step(model).backward()
    assert description(model) == before
    applied.remove()
    assert description(model) == before
    assert classes(model) == original


@pytest.mark.parametrize("name", NAMES)
def test_a_block_is_still_an_instance_of_its_class(name: str) -> None:
    model = ZOO[name].build()
    original = classes(model)
    applied = actmem.apply(model, Full())
    changed = [
        (module, kind) for module, kind in zip(model.modules(), original, strict=True) if type(module) is not kind
    ]
    assert len(changed) == len(applied.plan.blocks)
    for module, kind in changed:
        assert isinstance(module, kind)
        assert type(module).__name__ == kind.__name__


def duplicates(model: nn.Module) -> dict[str, nn.Module]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(file, weights_only=False),
    }


@pytest.mark.parametrize("name", ["llama", "gpt2_dropout", "resnet", "transformer_encoder", "torchtitan_like"])
def test_a_copy_of_an_applied_model_is_a_plain_one_with_weights_of_its_own(name: str) -> None:
    case = ZOO[name]
    model = case.build()
    original, expected = classes(model), gradients(case, model)
    model.zero_grad()
    with actmem.apply(model, Full()):
        assert_equal(gradients(case, model), expected)
        for how, duplicate in duplicates(model).items():
            assert classes(duplicate) == original, how
            assert not {id(p) for p in duplicate.parameters()} & {id(p) for p in model.parameters()}
            assert_equal(gradients(case, duplicate), expected)
            with torch.no_grad():
                for parameter in duplicate.parameters():
                    parameter.zero_()
        assert_equal(gradients(case, model), expected)
        shallow = copy.copy(next(m for m in model.modules() if type(m) not in original))
        assert type(shallow) in original


@pytest.mark.parametrize("name", ["llama", "resnet"])
def test_weights_go_from_an_applied_model_to_a_plain_one_and_back(name: str, tmp_path: Path) -> None:
    case = ZOO[name]
    model, other = case.build(), case.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    expected = gradients(case, model)
    with actmem.apply(model, Full()):
        torch.save(model.state_dict(), tmp_path / "weights.pt")
    with actmem.apply(other, Full()):
        other.load_state_dict(torch.load(tmp_path / "weights.pt"))
        if name == "llama":  # batch norm has moved on
            assert_equal(gradients(case, other), expected)
    for left, right in zip(model.state_dict().values(), case.build().state_dict().values(), strict=True):
        assert left.shape == right.shape


def test_applying_twice_is_refused_and_the_first_plan_stays() -> None:
    case = ZOO["llama"]
    model = case.build()
    with actmem.apply(model, Full()) as applied:
        with pytest.raises(ApplyError, match=r"applied.remove\(\)"):
            actmem.apply(model, Selective(save=["attention"]))
        with pytest.raises(ApplyError, match="already"):
            actmem.verify(model, case.batch(model), Full())
        case.step(model).backward()
        assert applied.report().num_replayed > 0
    actmem.apply(model, Full()).remove()


def test_a_part_of_an_applied_model_is_refused_too() -> None:
    model = ZOO["llama"].build()
    with actmem.apply(model, Full()), pytest.raises(ApplyError, match="already"):
        actmem.apply(model.model, Full())


def test_hugging_face_gradient_checkpointing_is_refused_with_the_line_that_switches_it_off() -> None:
    case = ZOO["llama"]
    model = case.build()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    original = classes(model)
    with pytest.raises(ApplyError, match=r"model.gradient_checkpointing_disable\(\)"):
        actmem.apply(model, Full())
    assert classes(model) == original
    model.gradient_checkpointing_disable()
    assert actmem.verify(model, case.batch(model), Full()).ok


def test_leaving_the_context_removes() -> None:
    case = ZOO["torchtitan_like"]
    model = case.build()
    original = classes(model)
    with actmem.apply(model, Full()):
        assert classes(model) != original
    assert classes(model) == original


def test_an_exception_removes_too_and_the_model_trains_on() -> None:
    case = ZOO["torchtitan_like"]
    model = case.build()
    original, expected = classes(model), gradients(case, model)
    batch = case.batch(model)

    def fail(gradient: Tensor) -> Tensor:
        raise ValueError("in the middle of backward")

    def failing_step() -> None:
        with actmem.apply(model, Full()):
            hidden: list[Tensor] = []
            hook = model.layers["1"].register_forward_hook(lambda module, args, out: hidden.append(out))
            loss = case.step(model, batch)
            hook.remove()
            hidden[0].register_hook(fail)
            loss.backward()

    with pytest.raises(ValueError, match="middle of backward"):
        failing_step()
    assert classes(model) == original
    assert_equal(gradients(case, model), expected)


def test_an_exception_in_forward_leaves_no_dispatch_mode_behind() -> None:
    case = ZOO["torchtitan_like"]
    model = case.build()
    expected = gradients(case, model)
    applied = actmem.apply(model, Full())

    def fail(module: nn.Module, args: Any) -> None:
        raise ValueError("in the middle of forward")

    hook = model.layers["1"].attention.wo.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="middle of forward"):
        case.step(model)
    hook.remove()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert_equal(gradients(case, model), expected)
    applied.remove()
    assert_equal(gradients(case, model), expected)


def test_removing_twice_does_nothing_more() -> None:
    model = ZOO["torchtitan_like"].build()
    original = classes(model)
    applied = actmem.apply(model, Full())
    applied.remove()
    applied.remove()
    assert classes(model) == original
    again = actmem.apply(model, Full())
    applied.remove()
    assert classes(model) != original, "the handle of an earlier plan does not remove a later one"
    again.remove()
    assert classes(model) == original


def test_a_graph_recorded_before_remove_can_still_go_backward() -> None:
    case = ZOO["gpt2_dropout"]
    model = case.build()
    expected = gradients(case, model)
    model.zero_grad()
    torch.manual_seed(0)
    with actmem.apply(model, Full()):
        loss = case.step(model)
    loss.backward()
    assert_equal({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected)


@pytest.mark.parametrize("name", ["llama", "t5", "resnet", "moe_topk"])
def test_a_saved_plan_does_the_same_again(name: str, tmp_path: Path) -> None:
    case = ZOO[name]
    model = case.build()
    path = tmp_path / "plan.json"
    mode = Selective(save=["attention", actmem.every_second(case.selective or "matmul")])
    first = actmem.verify(model, case.batch(model), mode, loss=case.loss)
    with actmem.apply(model, mode) as applied:
        applied.plan.save(path)
    text = path.read_text()
    again = actmem.verify(case.build(), case.batch(model), actmem.FromPlan(path), loss=case.loss)
    assert first.ok and again.ok
    assert again.report.plan == first.report.plan == Plan.load(path)
    assert again.report.kinds == first.report.kinds
    assert str(again.report) == str(first.report)
    with actmem.apply(model, actmem.FromPlan(path)) as applied:
        applied.plan.save(path)
    assert path.read_text() == text, "a plan that is read and written again makes no diff"
    with actmem.apply(model, Plan.load(path)) as applied:
        assert applied.plan.to_json() == text
