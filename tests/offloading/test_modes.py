"""Training that offloads is plain training to the bit, in every form, on every model; and something moved."""

import copy
import gc
import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actmem
from actmem import (
    ActmemError,
    Full,
    Offload,
    OffloadActivations,
    OffloadError,
    Plan,
    Report,
    Rule,
    Rules,
    Selective,
    UnsupportedError,
    every_second,
)
from actmem.modes import Mode
from actmem.structure import find_blocks, roles
from tests.zoo import ZOO, Case, TitanLike

Gradients = dict[str, Tensor]
PLACES = ("disk", "host")


def to(place: str, **rest: Any) -> Offload:
    """Offload everything, however small; one value at a time, so that what is away is away when it is measured."""
    return Offload(**{"to": place, "min_bytes": 0, "copy_cpu": place == "host", "in_flight_bytes": 1, **rest})


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


def gradients(model: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(want: Gradients, got: Gradients) -> None:
    assert want.keys() == got.keys()
    assert [name for name in want if not torch.equal(want[name], got[name])] == []


def assert_even(report: Report) -> None:
    """All that went out came back, or was dropped."""
    moved = report.moved
    assert moved is not None
    assert moved.out_bytes > 0, "nothing was moved"
    assert moved.out_bytes == moved.back_bytes + moved.dropped_bytes
    assert moved.waiting_bytes == 0


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
        assert report.held_bytes == max(0, held - report.offloaded_bytes)
    assert report.plain_bytes == kept.report().plain_bytes


# ---------------------------------------------------------------- one small model for all that follows


class Block(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(block: Callable[[], nn.Module] = Block) -> Stack:
    torch.manual_seed(0)
    return Stack(block)


def batch(seed: int = 0, rows: int = 16) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


SIMPLE: dict[str, Callable[[str], Mode]] = {
    "everything": lambda place: OffloadActivations(to=place, min_bytes=0, copy_cpu=place == "host"),
    "inputs": lambda place: Full(offload_inputs=to(place)),
    "mixed": lambda place: Rules(
        [Rule("offload", module="*.up"), Rule("save", module="*.down"), Rule("recompute")], offload=to(place)
    ),
}


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


every_form = pytest.mark.parametrize("form", SIMPLE)
every_place = pytest.mark.parametrize("place", PLACES)


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


# ---------------------------------------------------------------- what a model may go through


class Breaks(Block):
    broken = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.broken:
            raise ValueError("a user's error")
        return out


def left_over() -> tuple[list[str], list[str]]:
    """Return the threads of this process, and its open files."""
    files = [str(f.readlink()) for f in Path("/proc/self/fd").iterdir() if f.is_symlink() and f.exists()]
    return sorted(t.name for t in threading.enumerate()), sorted(files)


@every_place
@every_form
def test_after_an_exception_in_forward_the_next_step_is_right_and_remove_leaves_nothing(
    form: str, place: str, tmp_path: Path
) -> None:
    before = left_over()
    plain, managed = stack(Breaks), stack(Breaks)
    mode = SIMPLE[form](place)
    if place == "disk":
        mode = Rules(mode.rules(), offload=replace(mode.offload, directory=str(tmp_path)))
    with actmem.apply(managed, mode) as applied:
        for broken in (False, True, True, False):
            managed.blocks[2].broken = broken
            if broken:
                with pytest.raises(ValueError, match="a user's error"):
                    managed(batch())
                continue
            for model in (plain, managed):
                model.zero_grad()
                torch.manual_seed(1)
                model(batch()).sum().backward()
            assert_same(gradients(plain), gradients(managed))
        assert_even(applied.report())
        assert (list(tmp_path.iterdir()) == []) is (place == "host")
    assert left_over() == before
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_outlives_remove_still_has_its_values_and_then_leaves_nothing(tmp_path: Path) -> None:
    before = left_over()
    plain, managed = stack(), stack()
    applied = actmem.apply(managed, OffloadActivations(to="disk", min_bytes=0, directory=str(tmp_path)))
    losses = []
    for model in (plain, managed):
        torch.manual_seed(1)
        losses.append(model(batch()).square().sum())
    applied.remove()
    applied.remove()
    assert list(tmp_path.iterdir()) != []
    for loss in losses:
        loss.backward()
    assert_same(gradients(plain), gradients(managed))
    del loss, losses
    assert left_over() == before
    assert list(tmp_path.iterdir()) == []


@every_place
def test_apply_and_remove_many_times_leaves_no_thread_file_or_descriptor(place: str, tmp_path: Path) -> None:
    model = stack()
    before = left_over()
    for _ in range(15):
        how = to(place, directory=str(tmp_path)) if place == "disk" else to(place)
        with actmem.apply(model, Rules([Rule("offload")], offload=how)) as applied:
            model(batch()).sum().backward()
            assert_even(applied.report())
    assert left_over() == before
    assert list(tmp_path.iterdir()) == []


def test_a_handle_that_is_dropped_with_its_model_leaves_nothing(tmp_path: Path) -> None:
    before = left_over()
    model = stack()
    applied = actmem.apply(model, OffloadActivations(to="disk", min_bytes=0, directory=str(tmp_path)))
    model(batch()).sum().backward()
    assert applied.report().moved.out_bytes > 0
    del model, applied
    gc.collect()
    assert left_over() == before
    assert list(tmp_path.iterdir()) == []


def test_copies_of_an_applied_model_are_plain_models() -> None:
    model = stack()
    with actmem.apply(model, SIMPLE["everything"]("disk")) as applied:
        model(batch()).sum().backward()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
        sent = applied.report().moved.out_bytes
        for each in copies:
            each.zero_grad()
            each(batch()).sum().backward()
        assert applied.report().moved.out_bytes == sent
    for each in copies:
        each(batch()).sum().backward()


def test_a_plan_file_says_where_to_and_does_the_same(tmp_path: Path) -> None:
    path, model = tmp_path / "plan.json", stack()
    mode = Rules(
        [Rule("offload", module="*.up"), Rule("save", module="*.down"), Rule("recompute")],
        offload=Offload(to="disk", min_bytes=16, in_flight_bytes=4096, max_in_flight=3, directory=str(tmp_path)),
    )
    with actmem.apply(model, mode) as applied:
        applied.plan.save(path)
        model(batch()).sum().backward()
        report = applied.report()
    assert Plan.load(path) == applied.plan
    assert "to='disk'" in str(applied.plan)
    assert Plan.load(path).offload == mode.offload
    again = stack()
    with actmem.apply(again, actmem.FromPlan(path)) as second:
        again(batch()).sum().backward()
        assert second.report().moved == report.moved
        assert_even(second.report())


def test_the_report_says_what_moved(snapshot: SnapshotAssertion) -> None:
    model = stack()
    with actmem.apply(model, SIMPLE["everything"]("host")) as applied:
        fresh = str(applied.report())
        model(batch()).sum().backward()
        text = str(applied.report())
    assert "So far 0 B went out" in fresh
    assert text == snapshot


def test_without_an_accelerator_the_report_says_that_pin_means_nothing() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with actmem.apply(stack(), OffloadActivations(to="disk")) as pinned:
        assert "pin = True has no meaning here" in str(pinned.report())
    with actmem.apply(stack(), OffloadActivations(to="disk", pin=False)) as loose:
        assert "pin = True" not in str(loose.report())


# ---------------------------------------------------------------- what is refused


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_a_compiled_block_is_refused_and_the_repair_that_is_named_works() -> None:
    model = stack()
    with (
        actmem.apply(model, SIMPLE["everything"]("disk")),
        pytest.raises(UnsupportedError, match=r"blocks\.0 is compiled, and its plan offloads.*engine='tape'"),
    ):
        torch.compile(model, backend="eager")(batch()).sum().backward()
    torch.compiler.reset()
    with actmem.apply(model, SIMPLE["everything"]("disk"), engine="tape") as applied:
        torch.compile(model, backend="eager")(batch()).sum().backward()
        assert_even(applied.report())
    torch.compiler.reset()


def no_room_in_host_memory(model: nn.Module) -> None:
    actmem.apply(model, OffloadActivations(to="host", copy_cpu=True, limit_bytes=2**50))


def plan_without_a_place(model: nn.Module) -> None:
    with actmem.apply(model, SIMPLE["everything"]("disk")) as applied:
        plan = applied.plan
    actmem.apply(model, replace(plan, offload=None))


BAD: dict[str, Callable[[nn.Module], Any]] = {
    "to_is_no_place": lambda m: actmem.apply(m, OffloadActivations(to="gpu")),
    "to_is_nearly_a_place": lambda m: actmem.apply(m, OffloadActivations(to="dsik")),
    "to_is_no_text": lambda m: actmem.apply(m, OffloadActivations(to=None)),
    "min_bytes_is_negative": lambda m: actmem.apply(m, OffloadActivations(to="disk", min_bytes=-1)),
    "min_bytes_is_a_fraction": lambda m: actmem.apply(m, OffloadActivations(to="disk", min_bytes=0.5)),
    "in_flight_bytes_is_zero": lambda m: actmem.apply(m, OffloadActivations(to="disk", in_flight_bytes=0)),
    "max_in_flight_is_zero": lambda m: actmem.apply(m, OffloadActivations(to="disk", max_in_flight=0)),
    "limit_bytes_is_negative": lambda m: actmem.apply(m, OffloadActivations(to="disk", limit_bytes=-5)),
    "pin_is_a_number": lambda m: actmem.apply(m, OffloadActivations(to="disk", pin=1)),
    "directory_is_empty": lambda m: actmem.apply(m, OffloadActivations(to="disk", directory="")),
    "directory_beside_host": lambda m: actmem.apply(m, OffloadActivations(to="host", directory="scratch")),
    "directory_is_missing": lambda m: actmem.apply(m, OffloadActivations(to="disk", directory="nowhere")),
    "directory_is_a_file": lambda m: actmem.apply(m, OffloadActivations(to="disk", directory="file")),
    "directory_cannot_be_written": lambda m: actmem.apply(m, OffloadActivations(to="disk", directory="/proc")),
    "host_for_a_model_on_the_cpu": lambda m: actmem.apply(m, OffloadActivations(to="host")),
    "inputs_to_host_on_the_cpu": lambda m: actmem.apply(m, Full(offload_inputs=Offload(to="host"))),
    "offload_that_no_rule_asks_for": lambda m: actmem.apply(m, Rules([Rule("save")], offload=Offload(to="disk"))),
    "rules_that_say_no_place": lambda m: actmem.apply(m, Rules([Rule("offload", op="matmul"), Rule("recompute")])),
    "a_plan_that_says_no_place": plan_without_a_place,
    "a_text_and_no_offload": lambda m: actmem.apply(m, Full(offload_inputs="disk")),
    "a_mode_and_no_offload": lambda m: actmem.apply(m, Full(offload_inputs=OffloadActivations(to="disk"))),
    "true_and_no_offload": lambda m: actmem.apply(m, Selective(save=["attention"], offload=True)),
    "engine_checkpoint": lambda m: actmem.apply(m, OffloadActivations(to="disk"), engine="checkpoint"),
    "more_than_host_memory": no_room_in_host_memory,
    "more_than_the_disk": lambda m: actmem.apply(m, OffloadActivations(to="disk", limit_bytes=2**60)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_the_first_step_and_the_model_is_untouched(
    name: str, snapshot: SnapshotAssertion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    before = left_over()
    torch.manual_seed(0)
    model = TitanLike()
    classes = [type(m) for m in model.modules()]
    with pytest.raises(ActmemError) as caught:
        BAD[name](model)
    text = str(caught.value).replace(str(tmp_path), "FOLDER")
    if name.startswith("more_than"):
        assert isinstance(caught.value, OffloadError)
        assert "limit_bytes = " in text and "free" in text, "what was asked, and what there is"
    else:
        assert text == snapshot
    assert [type(m) for m in model.modules()] == classes
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert left_over() == before
