"""What a model that offloads may go through, from apply to remove, and what is refused before the first step."""

import copy
import gc
import io
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn

import actmem
from actmem import (
    ActmemError,
    Full,
    Offload,
    OffloadActivations,
    OffloadError,
    Plan,
    Rule,
    Rules,
    Selective,
)
from tests.offloading.stacks import (
    SIMPLE,
    Block,
    assert_even,
    assert_same,
    batch,
    every_form,
    every_place,
    gradients,
    stack,
    to,
)
from tests.zoo import TitanLike


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
    assert "So far: 0 B copied out" in fresh
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
@pytest.mark.parametrize("engine", ["auto", "tape"])
def test_a_compiled_block_sends_what_it_saves(engine: str) -> None:
    model = stack()
    with actmem.apply(model, SIMPLE["everything"]("disk"), engine=engine) as applied:
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
