"""What is predicted of a mode is what is measured, to the byte."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import actmem
from actmem.compat.torchtitan import CompilerBudget
from actmem.errors import ModeError, PlanError
from tests.planner.steps import DEVICE, Training, rows, stack, zoo
from tests.zoo import ZOO

FAKE_CANNOT = {"lstm", "audio_language"}
"""Models that only a real step shows: a fused recurrent kernel, and a shape that depends on numbers."""
ROUTED_ONE_BY_ONE = {"moe_topk"}
"""Models where what an expert takes depends on how many tokens it gets."""


def modes(name: str) -> dict[str, Any]:
    group = ZOO[name].selective or "matmul"
    return {
        "save_everything": actmem.SaveEverything(),
        "full": actmem.Full(),
        "every_second_block": actmem.Full(every=2),
        "every_second_product": actmem.Selective(save=[actmem.every_second(group)]),
        "attention_and_products": actmem.Selective(save=["attention", "matmul|batched_matmul|grouped_matmul", group]),
    }


MODES = tuple(modes("llama"))
DEFAULT = {
    "llama_use_cache": "every_second_product",
    "llama_lora": "every_second_block",
    "gpt2_dropout": "every_second_product",
    "t5": "full",
    "deepseek_v3": "attention_and_products",
    "gemma3_sliding": "every_second_product",
    "resnet": "every_second_product",
    "unet": "full",
    "transformer_encoder": "save_everything",
    "lstm": "full",
    "moe_topk": "every_second_block",
    "torchtitan_moe": "full",
}
"""One mode for each of some models that differ much; every model with every mode is slow."""


@cache
def profiled(name: str, fake: bool) -> actmem.Profile:
    return zoo(name).profile(fake=fake)


def check(name: str, mode: str, *, fake: bool) -> None:
    chosen = modes(name)[mode]
    measured = zoo(name).measured(chosen)
    found = actmem.predict(profiled(name, fake), chosen, DEVICE)
    assert measured.peak_bytes > 0
    assert (found.tensor_bytes, found.replayed_flops) == (measured.peak_bytes, measured.replayed_flops)
    assert abs(found.saved_bytes - measured.saved_bytes) <= 8  # the loss, and the gradient that backward begins with
    assert max(found.timeline) == found.peak_bytes


@pytest.mark.parametrize(("name", "mode"), DEFAULT.items())
def test_the_predicted_peak_and_the_replayed_flops_are_the_measured_ones(name: str, mode: str) -> None:
    check(name, mode, fake=name not in FAKE_CANNOT | ROUTED_ONE_BY_ONE)


@pytest.mark.slow
@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ZOO)
def test_they_are_for_every_model_and_mode_on_fake_tensors_and_for_real(name: str, mode: str, fake: bool) -> None:
    if fake and name in FAKE_CANNOT | ROUTED_ONE_BY_ONE:
        pytest.skip("only a real step shows what it takes")
    check(name, mode, fake=fake)


@pytest.mark.parametrize("name", sorted(ROUTED_ONE_BY_ONE))
def test_balanced_routing_is_a_little_above_what_is_measured_and_the_worst_is_never_below(name: str) -> None:
    worst = zoo(name).profile(routing="worst")
    for mode in modes(name).values():
        measured = zoo(name).measured(mode).peak_bytes
        balanced = actmem.predict(profiled(name, True), mode, DEVICE).tensor_bytes
        assert measured <= balanced <= 1.05 * measured
        assert actmem.predict(worst, mode, DEVICE).tensor_bytes >= measured


def test_the_place_of_the_peak_is_named() -> None:
    training = Training(stack(), rows(256), lambda out: out.square().mean())
    profile = training.profile()
    found = actmem.predict(profile, actmem.Full(), DEVICE)
    assert found.peak_block in profile.blocks
    assert found.peak_op == training.measured(actmem.Full()).peak_op.op
    assert found.num_replayed > 0


def test_time_is_that_of_the_named_device() -> None:
    profile = Training(stack(), rows(256), lambda out: out.square().mean()).profile()
    fast, slow = (actmem.predict(profile, actmem.Full(), name) for name in ("b200-180gb", "a100-80gb"))
    assert 0 < fast.step_seconds < slow.step_seconds
    assert 0 < fast.replay_seconds < slow.replay_seconds
    assert 1 < fast.step_time_ratio < 2
    assert fast.timeline == slow.timeline  # bytes are the same everywhere


@pytest.mark.parametrize("num_rows", [64, 1024])
def test_what_is_sent_to_disk_is_never_predicted_too_low(num_rows: int, tmp_path: Path) -> None:
    training = Training(stack(), rows(num_rows), lambda out: out.square().mean())
    profile = training.profile()
    for in_flight_bytes in (2**12, 2**20):
        mode = actmem.OffloadActivations(
            to="disk", min_bytes=1024, in_flight_bytes=in_flight_bytes, directory=str(tmp_path)
        )
        found = actmem.predict(profile, mode, DEVICE)
        assert found.sent_bytes > 0
        assert training.measured(mode).peak_bytes <= found.tensor_bytes


def test_a_plan_of_another_model_is_refused() -> None:
    profile = Training(stack(2), rows(4), lambda out: out.square().mean()).profile()
    other = Training(stack(3), rows(4), lambda out: out.square().mean())
    with actmem.apply(other.model, actmem.Full()) as applied, pytest.raises(PlanError, match="not of one model"):
        actmem.predict(profile, applied.plan, DEVICE)


def test_what_is_neither_a_plan_nor_a_mode_is_refused() -> None:
    profile = Training(stack(2), rows(4), lambda out: out.square().mean()).profile()
    mode: Any = CompilerBudget(0.5)
    with pytest.raises(ModeError, match=r"CompilerBudget\(fraction=0\.5\) is neither a plan nor a mode"):
        actmem.predict(profile, mode, DEVICE)


@pytest.mark.parametrize("name", ["llama", "moe_topk", "resnet"])
def test_what_is_offloaded_peaks_as_predicted(name: str) -> None:
    place = actmem.Offload(to="disk", min_bytes=0, in_flight_bytes=2**10)
    for mode in (actmem.Full(offload_inputs=place), actmem.OffloadActivations(to="disk", min_bytes=0)):
        training = zoo(name)
        found = actmem.predict(training.profile(fake=False), mode, DEVICE)
        measured = training.measured(mode)
        assert found.sent_bytes > 0
        above = found.tensor_bytes - measured.peak_bytes
        assert 0 <= above <= 128 if name == "resnet" else above == 0
