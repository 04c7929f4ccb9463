"""`actmem doctor --config`: what a configuration of another system becomes, and what is known to be wrong with it."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

AXOLOTL = """
base_model: a/b
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: true
activation_offloading: true
"""


def test_it_says_what_a_config_becomes_and_what_is_known_of_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text(AXOLOTL)
    asked = run("doctor", "--config", "config.yml")
    assert asked.code == 0, asked.err
    assert "a configuration of axolotl" in asked.out
    assert "actmem.Full(offload_inputs=actmem.Offload(to='host'" in asked.out
    assert "warning: use_reentrant = True in config.yml" in " ".join(asked.out.split())


@pytest.mark.parametrize(
    ("name", "text", "system", "becomes"),
    [
        ("rl.toml", "[model.ac]\n", "prime-rl", "actmem.apply(model, actmem.Full(), collectives='recompute')"),
        ("recipe.yaml", "distributed:\n  activation_checkpointing: false\n", "NeMo Automodel", None),
        (
            "run.sh",
            "./run_train.sh --activation_checkpoint.mode=full\n",
            "torchtitan",
            "actmem.apply(model, actmem.Full(), collectives='recompute')",
        ),
    ],
)
def test_the_document_has_it_too(
    run: Run, tmp_path: Path, name: str, text: str, system: str, becomes: str | None
) -> None:
    (tmp_path / name).write_text(text)
    asked = run("doctor", "--config", name, "--json")
    assert asked.code == 0, asked.err
    found = json.loads(asked.out)
    assert (found["config"]["system"], found["config"]["becomes"]) == (system, becomes)


def test_a_config_can_be_looked_at_together_with_a_model(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text(AXOLOTL)
    found = json.loads(run("doctor", "--config", "config.yml", "--model", "tiny:llama-3.1-8b", "--json").out)
    assert found["skipped"] == []
    assert "nothing-trained" in found["passed"]


def test_a_config_that_says_something_unknown_fails_like_any_mistake(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text("[model.ac]\nmode = 'some'\n")
    asked = run("doctor", "--config", "rl.toml", "--json")
    assert asked.code == 2
    assert "'some' is not known. Permitted: full, selective" in asked.out
