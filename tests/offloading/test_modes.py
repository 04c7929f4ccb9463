"""Training that offloads is plain training to the bit, in every form, on every model; and something moved."""

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actmem
from actmem import Full, Offload, Report, Rule, Rules, Selective, every_second
from actmem.modes import Mode
from actmem.structure import find_blocks, roles
from tests.offloading.stacks import (
    PLACES,
    SIMPLE,
    Block,
    Gradients,
    Stack,
    assert_even,
    assert_same,
    batch,
    every_form,
    every_place,
    gradients,
    stack,
    to,
)
from tests.zoo import ZOO, Case


def products(case: Case) -> str | None:
    """Name the operators whose results are worth a rule; of an LSTM, autograd needs none of the products' results."""
    return "pointwise" if "recurrent" in case.tags else case.selective


def everything(case: Case, how: Offload) -> Mode:
    return Rules([Rule("offload")], offload=how)


def inputs(case: Case, how: Offload) -> Mode:
    return Full(offload_inputs=how)


def attention(case: Case, how: Offload) -> Mode:
    there = any("attention" in roles(block.module) for block in find_blocks(case.build(), case.blocks))
    only = Rule("offload", target="attention") if there else Rule("offload", op=products(case))
    return Rules([only, Rule("save")], offload=how)


def mixed(case: Case, how: Offload) -> Mode:
    sent = Rule("offload", op=products(case), nth=None if "recurrent" in case.tags else "::2")
    return Rules([sent, Rule("save", op=case.selective), Rule("recompute")], offload=how)


def selective(case: Case, how: Offload) -> Mode:
    return Selective(save=["attention", every_second(case.selective or "matmul")], offload=how)


FORMS = (everything, inputs, attention, mixed, selective)


def cells() -> Iterator[Any]:
    """List every model with every form, place and precision. Of these, one of each model is not slow."""
    for place_in_zoo, name in enumerate(ZOO):
        round_, turn = divmod(place_in_zoo, len(FORMS))
        for form_number, form in enumerate(FORMS):
            for place_number, place in enumerate(PLACES):
                for precision in ("fp32", "bf16"):
                    wanted = (turn, (place_in_zoo + round_) % 2, "bf16" if place_in_zoo % 4 == 3 else "fp32")
                    slow = (form_number, place_number, precision) != wanted
                    marks = [pytest.mark.slow] if slow else []
                    yield pytest.param(name, form, place, precision, marks=marks)


NEEDLESS = {"qwen3_next"}
"""Models whose loops write in place, row by row: some versions are sent that no backward step reads."""


class Trained:
    """A model of the zoo that can take the same step again and again."""

    def __init__(self, case: Case, precision: str = "fp32") -> None:
        self.case, self.precision = case, precision
        self.model = case.build()
        self.batch = case.batch(self.model)
        self.gradients: Gradients = {}
        self.saved_bytes = 0

    def step(self) -> None:
        self.model.zero_grad()
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision == "bf16"):
            loss = self.case.step(self.model, self.batch)
        loss.backward()
        self.gradients = gradients(self.model) | {"loss": loss.detach()}

    def measure(self) -> None:
        self.saved_bytes = actmem.measure(self.step, model=self.model).saved_bytes


def as_saved(mode: Mode) -> Mode:
    """Turn a mode that offloads into the same mode without."""
    if isinstance(mode, Full):
        return Full()
    return Rules([replace(rule, decision="save") if rule.decision == "offload" else rule for rule in mode.rules()])


@pytest.mark.parametrize(("name", "form", "place", "precision"), list(cells()))
def test_an_offloading_step_is_a_plain_step_to_the_bit_and_its_bytes_are_elsewhere(
    name: str, form: Callable[[Case, Offload], Mode], place: str, precision: str
) -> None:
    case = ZOO[name]
    plain, managed = Trained(case, precision), Trained(case, precision)
    mode = form(case, to(place))
    with actmem.apply(managed.model, mode, blocks=case.blocks) as applied:
        plain.step()
        managed.step()
        assert_same(plain.gradients, managed.gradients)
        before = applied.report().moved
        assert before is not None and before.out_bytes > 0
        applied.check_replay()  # from its second call on a block may hold less: observe that one
        for trained in (plain, managed):
            trained.step() if precision == "bf16" else trained.measure()
        assert_same(plain.gradients, managed.gradients)
        report = applied.report()
        assert_even(report)
        assert report.moved is not None
        sent_bytes = report.moved.out_bytes - before.out_bytes
        dropped_bytes = report.moved.dropped_bytes - before.dropped_bytes
        assert 0 < sent_bytes <= report.offloaded_bytes + dropped_bytes, "what two blocks have in common is sent once"
        assert dropped_bytes <= (sent_bytes // 4 if name in NEEDLESS else 0), "every value that was sent was needed"
        if precision == "fp32":
            least_bytes = sent_bytes // 2 if form is everything else 1
            assert managed.saved_bytes <= plain.saved_bytes - least_bytes
    assert report.moved.store_bytes > 0 == applied.report().moved.store_bytes, "remove() gives the store up"
    if precision == "bf16":
        return
    with actmem.apply(managed.model, as_saved(mode), blocks=case.blocks) as kept:
        managed.step()
        kept.check_replay()
        managed.step()
        held = kept.report().held_bytes
    assert report.held_bytes < held
    if form not in (mixed, selective):  # there the smallest set is sought for what is saved, not for what is sent
        gone = {c.storage for c in report.counted if c.decision == "offload"}
        stays = {c.storage: c.num_bytes for c in report.counted if c.storage in gone and c.decision == "input"}
        assert report.held_bytes == max(0, held - report.offloaded_bytes + sum(stays.values())), "but for other blocks"
    assert report.plain_bytes == kept.report().plain_bytes


# ---------------------------------------------------------------- one small model for all that follows


def compared(
    run: Callable[[nn.Module], None], mode: Mode, block: Callable[[], nn.Module] = Block, steps: int = 3
) -> Report:
    """Run something on a plain model and on an offloading one, some times, and demand the same gradients."""
    plain, managed = stack(block), stack(block)
    with actmem.apply(managed, mode) as applied:
        for _ in range(steps):
            for model in (plain, managed):
                model.zero_grad()
                torch.manual_seed(5)
                run(model)
            assert_same(gradients(plain), gradients(managed))
        return applied.report()


@every_place
@every_form
def test_two_forwards_and_then_both_backwards(form: str, place: str) -> None:
    def run(model: nn.Module) -> None:
        losses = [model(batch(seed)).square().sum() for seed in range(2)]
        for loss in losses:
            loss.backward()

    assert_even(compared(run, SIMPLE[form](place)))


@every_place
@every_form
def test_microbatches_that_overlap_as_in_a_pipeline(form: str, place: str) -> None:
    def run(model: nn.Module) -> None:
        earlier = model(batch(0)).square().sum()
        for seed in range(1, 4):
            later = model(batch(seed)).square().sum()
            earlier.backward()
            earlier = later
        earlier.backward()

    assert_even(compared(run, SIMPLE[form](place)))


@every_place
@every_form
def test_backward_twice_through_one_graph(form: str, place: str) -> None:
    def run(model: nn.Module) -> None:
        loss = model(batch()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert_even(compared(run, SIMPLE[form](place)))


class TwoWays(Block):
    """Hand out a second result that no loss reads."""

    def forward(self, x: Any) -> Any:
        x = x[0] if isinstance(x, tuple) else x
        return super().forward(x), torch.tanh(self.up(x))


class TwoWayStack(Stack):
    def forward(self, x: Tensor) -> Any:
        aside = []
        for block in self.blocks:
            x, side = block(x)
            aside.append(side)
        return self.head(x), aside


def test_a_branch_that_no_backward_enters_is_dropped_with_its_graph() -> None:
    torch.manual_seed(0)
    plain = TwoWayStack(TwoWays)
    managed = copy.deepcopy(plain)
    with actmem.apply(managed, SIMPLE["everything"]("disk")) as applied:
        for _ in range(3):
            for model in (plain, managed):
                model.zero_grad()
                torch.manual_seed(5)
                model(batch())[0].square().sum().backward()
            assert_same(gradients(plain), gradients(managed))
        report = applied.report()
    assert_even(report)
    assert report.moved is not None
    assert report.moved.dropped_bytes == 3 * 3 * 16 * 64 * 4, "three steps, three blocks, a result of tanh each"


@every_place
def test_a_backward_that_is_skipped_drops_everything_without_the_garbage_collector(place: str) -> None:
    model = stack()
    gc.collect()
    gc.disable()
    try:
        with actmem.apply(model, SIMPLE["everything"](place)) as applied:
            for seed in range(3):
                loss = model(batch(seed)).square().sum()
                assert applied.report().moved.waiting_bytes > 0
                del loss
                assert applied.report().moved.waiting_bytes == 0
            report = applied.report()
    finally:
        gc.enable()
    assert_even(report)
    assert report.moved.dropped_bytes == report.moved.out_bytes


def test_without_gradients_or_in_eval_mode_nothing_is_sent() -> None:
    model = stack()
    with actmem.apply(model, SIMPLE["everything"]("disk")) as applied:
        with torch.no_grad():
            model(batch())
        with torch.inference_mode():
            model(batch())
        model.eval()
        model(batch())
        assert applied.report().moved.out_bytes == 0
        model.train()
        model(batch()).sum().backward()
        assert applied.report().moved.out_bytes > 0


class LoRA(Block):
    """Add the adapter into the result of the frozen product, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        hidden += self.b(self.a(x))
        hidden = F.gelu(hidden)
        hidden *= 2
        return x + self.dropout(self.down(hidden))


class Checkpointed(Block):
    """Use torch's own checkpoint for a part."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda y: self.dropout(self.down(F.gelu(self.up(self.norm(y))))), x, use_reentrant=False)


@every_place
@pytest.mark.parametrize("form", ["everything", "inputs"])
@pytest.mark.parametrize("block", [LoRA, Checkpointed])
def test_blocks_that_write_in_place_or_recompute_by_themselves(block: type[nn.Module], form: str, place: str) -> None:
    assert_even(compared(lambda model: model(batch()).square().sum().backward(), SIMPLE[form](place), block))


@every_place
def test_sizes_that_change_from_step_to_step(place: str) -> None:
    rows = iter([16, 16, 40, 40, 8, 8, 33, 33])
    run = compared(
        lambda model: model(batch(rows=next(rows))).square().sum().backward(), SIMPLE["mixed"](place), steps=4
    )
    assert_even(run)
