"""`actmem.offload` alone: any model as it is, one step after the other, and the gradients of plain training."""

import copy
import gc
import re
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actmem
from actmem import Full, ModeError, OffloadError, VersionError
from actmem.offloading import TransferCounts
from actmem.structure import find_head
from tests.zoo import ZOO, causal_lm

Gradients = dict[str, Tensor]
PLACES: dict[str, dict[str, Any]] = {
    "disk": {"to": "disk", "min_bytes": 0},
    "host": {"to": "host", "min_bytes": 0, "copy_cpu": True},
}
every_place = pytest.mark.parametrize("place", PLACES)


def gradients(model: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(want: Gradients, got: Gradients) -> None:
    assert want.keys() == got.keys()
    assert [name for name in want if not torch.equal(want[name], got[name])] == []


def assert_even(away: Any) -> None:
    ledger = away.ledger
    assert ledger.out_bytes > 0, "nothing was moved"
    assert ledger.out_bytes == ledger.back_bytes + ledger.dropped_bytes
    assert ledger.waiting_bytes == 0


def left_over() -> tuple[list[str], list[str]]:
    files = [str(f.readlink()) for f in Path("/proc/self/fd").iterdir() if f.is_symlink() and f.exists()]
    return sorted(t.name for t in threading.enumerate()), sorted(files)


# ---------------------------------------------------------------- models as they are

NAMES = ["llama", "llama_lora", "gpt2_dropout", "t5", "mixtral", "qwen3_next", "gemma3n_shared_kv", "resnet", "unet"]
FAST = {("llama", "disk"), ("llama_lora", "host"), ("gpt2_dropout", "disk"), ("mixtral", "host"), ("unet", "disk")}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(name, place, marks=[] if (name, place) in FAST else [pytest.mark.slow])
        for name in NAMES
        for place in PLACES
    ],
)
def test_an_unmodified_model_trains_to_the_same_bits_step_after_step(name: str, place: str) -> None:
    case = ZOO[name]
    plain, managed = case.build(), case.build()
    batch = case.batch(plain)
    away = actmem.offload(managed, **PLACES[place], warn_if_no_head=False)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (plain, managed)]
    per_step: list[int] = []
    for _ in range(3):
        for model, optimizer in zip((plain, managed), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(3)
            if model is plain:
                case.step(model, batch).backward()
            else:
                with away as entered:
                    loss = case.step(model, batch)
                assert entered is away
                loss.backward()  # what was sent is fetched after the context is left
                del loss
        assert_same(gradients(plain), gradients(managed))
        for optimizer in optimizers:
            optimizer.step()
        assert_even(away)
        per_step.append(away.ledger.out_bytes)
    assert per_step[1] - per_step[0] == per_step[0] == per_step[2] - per_step[1], "the same in each step"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in managed.modules()), "no hook is left"
    away.close()


@every_place
def test_gradient_accumulation_in_one_context_or_several(place: str) -> None:
    case = ZOO["gpt2_dropout"]
    plain, managed = case.build(), case.build()
    away = actmem.offload(managed, **PLACES[place])
    for split in (False, True):
        for model in (plain, managed):
            model.zero_grad()
            torch.manual_seed(3)
        torch.manual_seed(3)
        for loss in [case.step(plain) for _ in range(2)]:
            loss.backward()
        torch.manual_seed(3)
        if split:
            losses = []
            for _ in range(2):
                with away:
                    losses.append(case.step(managed))
        else:
            with away:
                losses = [case.step(managed) for _ in range(2)]
        for loss in losses:
            loss.backward()
        del loss, losses
        assert_same(gradients(plain), gradients(managed))
        assert_even(away)
    away.close()


class Checkpointed(nn.Module):
    """A model that checkpoints its blocks by torch's own means."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(3)
        )
        self.lm_head = nn.Linear(32, 8)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.lm_head(x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torch_checkpointing_in_the_same_model_sends_what_its_regions_keep(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    plain = Checkpointed(use_reentrant)
    managed = copy.deepcopy(plain)
    x = torch.randn(16, 32, requires_grad=True)
    away = actmem.offload(managed, **PLACES["disk"])
    for _ in range(2):
        for model in (plain, managed):
            model.zero_grad()
            torch.manual_seed(3)
            with away if model is managed else nullcontext():
                model(x).square().sum().backward()
        assert_same(gradients(plain), gradients(managed))
    assert_even(away)
    away.close()


@pytest.mark.parametrize("mode", [Full(), actmem.SaveEverything(), actmem.OffloadActivations(to="disk", min_bytes=0)])
def test_a_plan_in_the_same_model_hands_on_what_it_keeps(mode: Any) -> None:
    case = ZOO["qwen3"]
    plain, managed = case.build(), case.build()
    batch = case.batch(plain)
    away = actmem.offload(managed, **PLACES["disk"])
    with actmem.apply(managed, mode) as applied:
        for _ in range(3):
            for model in (plain, managed):
                model.zero_grad()
                torch.manual_seed(3)
                with away if model is managed else nullcontext():
                    case.step(model, batch).backward()
            assert_same(gradients(plain), gradients(managed))
        assert_even(away)
        if mode == Full():
            assert applied.report().num_replayed > 0
            assert away.ledger.out_bytes < 3 * applied.report().plain_bytes // 5, "little is kept, so little is sent"
    away.close()


# ---------------------------------------------------------------- tensors of every shape


def through(run: Callable[[Tensor], Tensor], x: Tensor, **settings: Any) -> Any:
    """Compare gradients of a function of one tensor, plain and offloaded; return the ledger."""
    model = nn.Identity()  # a model without a head and without parameters
    found = []
    for offloaded in (False, True):
        leaf = x.clone().requires_grad_()
        if offloaded:
            away = actmem.offload(model, **{**PLACES["disk"], **settings}, warn_if_no_head=False)
            with away:
                out = run(leaf)
            out.backward()
            del out
        else:
            run(leaf).backward()
        found.append(leaf.grad)
    assert torch.equal(
        torch.view_as_real(found[0]) if x.is_complex() else found[0],
        torch.view_as_real(found[1]) if x.is_complex() else found[1],
    )
    assert_even(away)
    ledger = away.ledger
    away.close()
    return ledger


def test_views_of_one_storage_are_one_copy_with_their_own_strides() -> None:
    def run(leaf: Tensor) -> Tensor:
        base = leaf * 2
        views = [base.t(), base[1:, ::2], base.unsqueeze(0).expand(3, -1, -1), base[:, 3], base.flip(0)]
        return sum((view.sin() for view in views[:1]), torch.zeros(())).sum() + sum(v.square().sum() for v in views[1:])

    ledger = through(run, torch.randn(8, 16))
    assert ledger.out_bytes == 2 * 8 * 16 * 4, "the storage of the views, and that of the flipped copy"


def test_conjugate_and_negative_views_come_back_with_their_bits() -> None:
    def run(leaf: Tensor) -> Tensor:
        value = leaf * (1 + 2j)
        return (value.conj() * value).real.sum() + (value.conj().imag * value.imag).exp().sum()

    through(run, torch.randn(4, 6, dtype=torch.complex64) / 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_every_dtype_comes_back(dtype: torch.dtype) -> None:
    through(lambda leaf: (leaf.exp() * leaf.exp()[0]).sum(), torch.randn(5, 7).to(dtype))


def test_integers_and_booleans_that_autograd_saves_come_back() -> None:
    index = torch.randint(0, 8, (64,), generator=torch.Generator().manual_seed(0))
    through(
        lambda leaf: F.embedding(index * 1, leaf * 2).where(index[:, None] > 3, 0).square().sum(), torch.randn(8, 4)
    )


def test_small_tensors_stay() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2), nn.Tanh())
    with actmem.offload(model, to="disk", min_bytes=64 * 64 * 4, warn_if_no_head=False) as away:
        model(torch.randn(64, 64)).sum().backward()
    assert away.ledger.out_bytes == 3 * 64 * 64 * 4, "the input, and what the first layer and the activation made"
    away.close()


def test_parameters_and_buffers_are_never_sent() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.register_buffer("scale", torch.randn(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.t()) * self.scale[:16]

    model = Scaled()
    x = torch.randn(16, 64)
    with actmem.offload(model, **PLACES["disk"], warn_if_no_head=False) as away:
        model(x).sum().backward()
    assert away.ledger.out_bytes == x.nbytes
    away.close()


def test_activations_come_back_on_the_cpu() -> None:
    saved: list[Tensor] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            saved.extend(ctx.saved_tensors)
            return grad

    through(lambda leaf: Look.apply(leaf * 2).sum(), torch.randn(6))
    assert [t.device.type for t in saved] == ["cpu", "cpu"]
    assert torch.equal(*saved)


# ---------------------------------------------------------------- graphs


def test_a_backward_that_never_runs_drops_everything() -> None:
    model = ZOO["llama"].build()
    gc.collect()
    gc.disable()
    try:
        with actmem.offload(model, **PLACES["host"]) as away:
            loss = ZOO["llama"].step(model)
            assert away.ledger.waiting_bytes == away.ledger.out_bytes > 0
            del loss
            assert away.ledger.dropped_bytes == away.ledger.out_bytes
    finally:
        gc.enable()
    away.close()


@every_place
def test_backward_twice_fetches_twice(place: str) -> None:
    case = ZOO["llama"]
    plain, managed = case.build(), case.build()
    away = actmem.offload(managed, **PLACES[place])
    for model in (plain, managed):
        with away if model is managed else nullcontext():
            loss = case.step(model)
            loss.backward(retain_graph=True)
            loss.backward()
            del loss
    assert_same(gradients(plain), gradients(managed))
    assert_even(away)
    assert away.ledger.again_bytes >= away.ledger.back_bytes
    away.close()


def test_double_backward_comes_back() -> None:
    def run(leaf: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((leaf.exp() * leaf.sin()).sum(), leaf, create_graph=True)
        return slope.square().sum()

    through(run, torch.randn(9))


def test_what_is_written_on_after_it_was_saved_is_right_or_raises() -> None:
    """Plain autograd raises. Offloaded, the value may be safe already; then it is used, and never the new one."""
    model = nn.Identity()
    for size in (4, 400_000):
        leaf = torch.randn(size, requires_grad=True)
        away = actmem.offload(model, **PLACES["disk"], warn_if_no_head=False)
        with away:
            hidden = leaf * 2
            out = hidden.square().sum()
        hidden.detach().add_(1)
        try:
            out.backward()
        except VersionError:
            pass
        else:
            assert torch.equal(leaf.grad, 8 * leaf.detach())
        del out, hidden
        away.close()


def test_what_stays_and_is_written_on_raises_as_in_plain_training() -> None:
    model = nn.Identity()
    with actmem.offload(model, to="disk", min_bytes=2**20, warn_if_no_head=False) as away:
        hidden = torch.randn(8, requires_grad=True) * 2
        out = hidden.exp().sum() + hidden.square().sum()
    hidden.detach().add_(1)
    with pytest.raises(VersionError, match=r"shape \(8,\) was written to after autograd had saved it"):
        out.backward()
    away.close()


def test_a_graph_whose_values_all_stay_does_not_hold_itself() -> None:
    """What an operator saves of its own result must not be that tensor itself, or nothing ever frees the graph."""
    model = nn.Identity()
    gc.collect()
    gc.disable()
    try:
        with actmem.offload(model, to="disk", min_bytes=2**20, warn_if_no_head=False) as away:
            hidden = torch.randn(8, requires_grad=True) * 2
            alive = weakref.ref(hidden.untyped_storage())
            out = hidden.square().exp().softmax(-1).sum()
            del hidden, out
        assert alive() is None
    finally:
        gc.enable()
    away.close()


# ---------------------------------------------------------------- the output head


class Headed(nn.Module):
    def __init__(self, name: str = "lm_head") -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 32), nn.GELU())
        *path, last = name.split(".")
        owner: nn.Module = self
        for part in path:
            owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.add_module(last, nn.Linear(32, 32))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.name)(self.body(x)).log_softmax(-1)


@pytest.mark.parametrize(
    "name",
    ["output", "output.linear", "lm_head", "decoder.output", "decoder.lm_head", "head", "final_layer_norm", "ln_f"],
)
def test_the_head_and_the_loss_stay(name: str) -> None:
    model = Headed(name)
    with actmem.offload(model, **PLACES["disk"]) as away:
        for step in range(1, 3):
            model(torch.randn(16, 32)).sum().backward()
            # The input of the first layer and what it made; not the head's input, which the head itself saves.
            assert away.ledger.out_bytes == step * 2 * 16 * 32 * 4
    away.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports the compiler
def test_the_head_is_found_through_wrappers() -> None:
    model = ZOO["llama"].build()
    assert find_head(model) is model.lm_head
    assert find_head(nn.DataParallel(model)) is model.lm_head
    assert find_head(torch.compile(model)) is model.lm_head
    adapted = ZOO["llama_lora"].build()
    assert find_head(adapted) is adapted.base_model.model.lm_head
    assert find_head(nn.DataParallel(adapted)) is adapted.base_model.model.lm_head
    assert find_head(ZOO["t5"].build()).out_features == 64
    assert find_head(nn.Sequential(nn.Linear(2, 2))) is None


def test_a_wrapped_model_offloads_as_the_model_itself() -> None:
    case, sent = ZOO["llama"], []
    for wrap in (lambda m: m, nn.DataParallel):
        model = wrap(case.build())
        with actmem.offload(model, **PLACES["disk"]) as away:
            case.step(model).backward()
        sent.append(away.ledger.out_bytes)
        away.close()
    assert sent[0] == sent[1] > 0


def test_a_model_without_a_head_is_warned_of_where_the_user_stands() -> None:
    with pytest.warns(UserWarning, match="no output head was found in Sequential.*warn_if_no_head=False") as caught:
        actmem.offload(nn.Sequential(nn.Linear(2, 2)), to="disk").close()
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actmem.offload(nn.Sequential(nn.Linear(2, 2)), to="disk", warn_if_no_head=False).close()


# ---------------------------------------------------------------- in and out


def test_it_is_a_decorator_and_may_be_entered_again_and_again() -> None:
    case = ZOO["llama"]
    model = causal_lm("llama")()
    away = actmem.offload(model, **PLACES["host"])

    @away
    def train_step() -> None:
        case.step(model).backward()

    train_step()
    first = away.ledger.out_bytes
    for _ in range(4):
        train_step()
    assert away.ledger.out_bytes == 5 * first > 0
    away.close()


def test_entered_twice_at_once_it_is_left_as_often() -> None:
    model = Headed()
    away = actmem.offload(model, **PLACES["disk"])
    with away, away:
        model(torch.randn(4, 32)).sum().backward()
    assert not any(m._forward_pre_hooks for m in model.modules())
    before = away.ledger.out_bytes
    model(torch.randn(4, 32)).sum().backward()
    assert away.ledger.out_bytes == before > 0
    away.close()


def test_after_an_exception_inside_it_is_left_and_works_again() -> None:
    model = Headed()
    away = actmem.offload(model, **PLACES["disk"])
    with pytest.raises(RuntimeError), away:
        model(torch.randn(4, 31))
    assert not any(m._forward_pre_hooks for m in model.modules())
    with away:
        model(torch.randn(4, 32)).sum().backward()
    assert_even(away)
    away.close()


@every_place
def test_close_waits_for_the_graph_and_then_leaves_nothing(place: str, tmp_path: Path) -> None:
    before = left_over()
    case = ZOO["llama"]
    plain, managed = case.build(), case.build()
    folder = {"directory": str(tmp_path)} if place == "disk" else {}
    with actmem.offload(managed, **PLACES[place], **folder) as away:
        loss = case.step(managed)
    away.close()
    away.close()
    loss.backward()
    case.step(plain).backward()
    assert_same(gradients(plain), gradients(managed))
    del loss
    assert left_over() == before
    assert list(tmp_path.iterdir()) == []
    with away, pytest.raises(OffloadError, match="closed"):
        case.step(managed)


def test_a_context_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    before = left_over()
    model = Headed()
    with actmem.offload(model, **PLACES["disk"], directory=str(tmp_path)) as away:
        model(torch.randn(4, 32)).sum().backward()
    del away
    gc.collect()
    assert left_over() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "the model is on the CPU"),
        ({"to": "gpu"}, "Permitted: host, disk"),
        ({"to": "disk", "min_byte": 3}, "min_byte.*fields of actmem.Offload"),
        ({"to": "disk", "in_flight_bytes": 0}, "in_flight_bytes = 0"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_entered(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ModeError, match=match):
        actmem.offload(Headed(), **given)


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(ModeError, match=r"is not a module\. Write actmem\.offload\(model, to='disk'\)"):
        actmem.offload("model", to="disk")


# ---------------------------------------------------------------- the documentation

PAGE = Path(__file__).parents[2] / "docs" / "offload.md"


def examples() -> list[Any]:
    text = PAGE.read_text()
    blocks = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [
        pytest.param(text[: b.start()].count("\n") + 2, b[1], id=f"line {text[: b.start()].count(chr(10)) + 2}")
        for b in blocks
    ]


@pytest.mark.parametrize(("line", "code"), examples())
def test_an_example_of_the_page_runs_and_trains(
    line: int, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = ZOO["qwen3"]
    model, plain = case.build(), case.build()
    given: dict[str, Any] = {"actmem": actmem, "model": model, "folder": str(tmp_path)}
    given["train_step"] = lambda model: case.step(model).backward()
    exec(compile("\n" * (line - 1) + code, str(PAGE), "exec"), given)
    applied = given.get("applied")
    if applied is not None:
        model.zero_grad()
        case.step(model).backward()
        case.step(plain).backward()
        assert_same(gradients(plain), gradients(model))
        assert applied.report().moved is not None
        applied.remove()
    del given, applied
    assert list(tmp_path.iterdir()) == []


def test_the_page_names_every_setting_and_every_entry_of_the_ledger() -> None:
    text = PAGE.read_text()
    names = [f.name for kind in (actmem.Offload, TransferCounts) for f in fields(kind)]
    assert [name for name in names if f"`{name}`" not in text and f"{name}=" not in text] == []
