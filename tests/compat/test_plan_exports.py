"""Plans become settings of other systems: read back they mean the same, and there they take what was predicted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

import actmem
from actmem.compat.configs import read_config
from actmem.compat.exports import Exported, export_plan
from tests.flat_device import FLAT
from tests.integrations.training import Sentences, build_llama, padded

NUM_LAYERS = 4
READ = ("torchtitan", "nemo", "axolotl")
SYSTEMS = (*READ, "megatron", "transformers", "deepspeed")
BATCH = padded([Sentences()[n] for n in range(4)])


def build() -> Any:
    model = build_llama(NUM_LAYERS).train()
    model.config.use_cache = False  # as it is under transformers' checkpointing
    return model


@pytest.fixture(scope="module")
def profile() -> actmem.Profile:
    return actmem.profile(build(), BATCH, optimizer=None)


@pytest.fixture(scope="module")
def plan(profile: actmem.Profile) -> actmem.Plan:
    least, most = (actmem.predict(profile, mode, FLAT).peak_bytes for mode in (actmem.Full(), actmem.SaveEverything()))
    return actmem.fit(profile, budget=(least + most) // 2, device=FLAT)


def exported(profile: actmem.Profile, plan: Any, to: str) -> Exported:
    return export_plan(profile, plan, to, FLAT)


@pytest.mark.parametrize("to", SYSTEMS)
def test_settings_are_within_the_plans_peak_or_say_by_how_much_they_are_not(
    profile: actmem.Profile, plan: actmem.Plan, to: str
) -> None:
    found = exported(profile, plan, to)
    assert plan.predicted is not None
    assert found.planned.peak_bytes == plan.predicted.peak_bytes
    over = found.predicted.peak_bytes > found.planned.peak_bytes
    assert over == any("plan's peak" in sentence for sentence in found.lost)
    assert found.predicted == actmem.predict(profile, found.mode, FLAT)
    assert found.text in str(found).replace("\n  ", "\n") or not found.text
    assert any("rules:" in sentence for sentence in found.lost)  # a fitted plan says more than any system can


@pytest.mark.parametrize("to", READ)
@pytest.mark.parametrize("name", ["full", "save", "every", "fitted", "offload"])
def test_an_exported_file_is_read_back_as_the_mode_that_was_predicted(
    profile: actmem.Profile, plan: actmem.Plan, to: str, name: str, tmp_path: Path
) -> None:
    modes = {
        "full": actmem.Full(),
        "save": actmem.SaveEverything(),
        "every": actmem.Full(every=2, first=1),
        "fitted": plan,
        "offload": actmem.Full(offload_inputs=actmem.Offload(to="host")),
    }
    found = exported(profile, modes[name], to)
    path = tmp_path / f"config{found.suffix}"
    found.save(path)
    if to == "axolotl":  # by which its files are recognised
        path.write_text(f"base_model: a/b\n{found.text}")
    read = read_config(path).mode or actmem.SaveEverything()
    if found.settings.get("distributed") == {"activation_checkpointing": True}:
        assert read == actmem.Full()  # what it does there is predicted, part by part: it holds more
        assert found.predicted.saved_bytes > actmem.predict(profile, actmem.Full(), FLAT).saved_bytes
    else:
        assert read == found.mode


def test_what_can_be_said_is_said_and_nothing_is_lost(profile: actmem.Profile) -> None:
    expected: dict[str, Any] = {
        "torchtitan": {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}},
        "transformers": None,
        "megatron": None,
    }
    found = exported(profile, actmem.Full(every=2, first=1), "torchtitan")
    assert (found.settings, found.lost) == (expected["torchtitan"], ())
    found = exported(profile, actmem.Full(every=2), "transformers")
    assert found.settings["gradient_checkpointing_kwargs"] == {"use_reentrant": False, "every_n_layers": 2}
    assert found.lost == ()
    found = exported(profile, actmem.Full(layers="0:3"), "megatron")
    assert found.text == "--recompute-granularity full --recompute-method block --recompute-num-layers 3\n"
    assert found.lost == ()


def test_flags_are_those_that_megatron_takes(profile: actmem.Profile) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recompute-granularity", choices=["full", "selective"])
    parser.add_argument("--recompute-method", choices=["uniform", "block"])
    parser.add_argument("--recompute-num-layers", type=int)
    parser.add_argument("--recompute-modules", nargs="*")
    found = exported(profile, actmem.Targets(["norm", "mlp"]), "megatron")
    read = parser.parse_args(found.text.split())
    assert (read.recompute_granularity, read.recompute_modules) == ("selective", ["layernorm", "mlp"])


# -------------------------------------------------------------------- in the other system


def _peak(model: Any) -> int:
    def step() -> None:
        model(**BATCH).loss.backward()
        model.zero_grad()

    step()
    return actmem.measure(step, model=model).tensor_bytes


@pytest.mark.parametrize("every", [1, 2])
def test_transformers_takes_what_was_predicted_of_its_settings(
    profile: actmem.Profile, every: int, tmp_path: Path
) -> None:
    found = exported(profile, actmem.Full(every=every), "transformers")
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **json.loads(found.text))
    model = build()
    kwargs = dict(args.gradient_checkpointing_kwargs or {})
    every_n_layers = kwargs.pop("every_n_layers", 1)
    model.gradient_checkpointing_enable(every_n_layers=every_n_layers, gradient_checkpointing_kwargs=kwargs)
    measured = _peak(model)
    assert measured <= found.predicted.tensor_bytes <= 1.03 * measured


# -------------------------------------------------------------------- what is refused


def test_a_system_that_is_not_known_is_refused(profile: actmem.Profile) -> None:
    with pytest.raises(actmem.ModeError, match="Did you mean 'megatron'"):
        exported(profile, actmem.Full(), "megatrn")


def test_a_plan_for_another_step_is_refused(profile: actmem.Profile, plan: actmem.Plan) -> None:
    other = actmem.profile(build(), padded([Sentences()[0]]), optimizer=None)
    with pytest.raises(actmem.PlanError, match="the plan was made for shapes"):
        exported(other, plan, "torchtitan")


def test_a_file_that_cannot_be_written_is_refused(profile: actmem.Profile, tmp_path: Path) -> None:
    with pytest.raises(actmem.PlanError, match="cannot write"):
        exported(profile, actmem.Full(), "torchtitan").save(tmp_path / "none" / "config.toml")
