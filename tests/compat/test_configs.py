"""The configuration files of other systems are read: what they become here, and what is refused by name."""

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import actmem
from actmem import (
    Full,
    ModeError,
    Offload,
    OffloadActivations,
    Rule,
    Rules,
    Selective,
    Targets,
    every_second,
)
from actmem.compat import axolotl, nemo, prime_rl, torchtitan
from actmem.compat.configs import FromConfig, read_config
from actmem.compat.torchtitan import CompilerBudget
from tests.compat.training import assert_trains_the_same, layers_of
from tests.zoo import ZOO

HOST = Offload(to="host", min_bytes=1024, max_in_flight=5)
SELECTED = [
    Rule("recompute", layer_type="sliding_attention", op="attention"),
    Rule("recompute", layer_type="chunked_attention", op="attention"),
]
ON = "base_model: a/b\ngradient_checkpointing: true\n"
ALL_OF_IT = """selective_checkpointing:
  save: [attention, 'aten::mm']
  save_sliding_window: true
  offload: true
  save_modules: [down_proj]
"""
AXOLOTL: dict[str, tuple[str, Any]] = {
    "nothing": ("base_model: a/b\n", None),
    "off": ("base_model: a/b\ngradient_checkpointing: false\n", None),
    "checkpointing": (ON, Full()),
    "fsdp": ("base_model: a/b\nfsdp_config:\n  activation_checkpointing: true\n", Full()),
    "offloading": (f"{ON}activation_offloading: true\n", Full(offload_inputs=HOST)),
    "offloading with an adapter": (
        f"{ON}activation_offloading: true\nadapter: qlora\n",
        OffloadActivations(to="host", min_bytes=1024, max_in_flight=5),
    ),
    "legacy": (
        f"{ON}activation_offloading: legacy\n",
        Full(offload_inputs=Offload(to="host", min_bytes=1024, max_in_flight=5, use_streams=False)),
    ),
    "disk": (
        f"{ON}activation_offloading: disk\n",
        Full(offload_inputs=Offload(to="disk", min_bytes=1024, max_in_flight=5)),
    ),
    "hidden states": (
        f"{ON}activation_offloading: hidden_states\nadapter: lora\n",
        Full(offload_inputs=Offload(to="host", min_bytes=1024, max_in_flight=2)),
    ),
    "the older word": ("base_model: a/b\ngradient_checkpointing: offload\n", Full(offload_inputs=HOST)),
    "the older word for disk": (
        "base_model: a/b\ngradient_checkpointing: offload_disk\n",
        Full(offload_inputs=Offload(to="disk", min_bytes=1024, max_in_flight=5)),
    ),
    "selective": (
        f"{ON}selective_checkpointing: true\n",
        Rules([*SELECTED, Rule("save", op="attention"), Rule("recompute")]),
    ),
    "selective, all of it": (
        f"{ON}activation_offloading: hidden_states\n{ALL_OF_IT}",
        Rules(
            [
                Rule("offload", op="input"),
                Rule("offload", module="*.down_proj", op="aten.mm|aten.addmm|aten.linear|aten._grouped_mm"),
                Rule("offload", op="attention"),
                Rule("offload", op="*aten.mm*"),
                Rule("recompute"),
            ],
            offload=Offload(to="host", min_bytes=1024),
        ),
    ),
}
PRIME_RL: dict[str, tuple[str, Any]] = {
    "nothing": ("[trainer.model]\nname = 'a/b'\n", None),
    "full": ("[model.ac]\n", Full()),
    "every second": ("[trainer.model.ac]\nfreq = 2\n", Full(every=2)),
    "targets": ("[model.ac]\nmode = 'selective'\ntargets = ['norm', 'mlp']\n", Targets(["norm", "mlp"])),
    "operators": ("[model.ac]\nmode = 'selective'\ntargets = ['aten::mm']\n", Selective(save=["aten.mm"])),
    "offloading alone": (
        "[model.ac_offloading]\npin_memory = false\nmax_inflight_activations = 1\n",
        Full(offload_inputs=Offload(to="host", min_bytes=1024, max_in_flight=1, pin=False)),
    ),
    "targets and offloading": (
        "[model.ac]\nmode = 'selective'\nfreq = 2\n[model.ac_offloading]\n",
        Rules([Rule("recompute", layers="0::2", target="norm"), Rule("offload")], offload=HOST),
    ),
}
NEMO: dict[str, tuple[str, Any]] = {
    "nothing": ("distributed:\n  strategy: fsdp2\n", None),
    "off by word": ("distributed:\n  activation_checkpointing: disabled\n", None),
    "full": ("distributed:\n  activation_checkpointing: true\n", Full()),
    "full by word": ("distributed:\n  activation_checkpointing: Full\n", Full()),
}
TITAN: dict[str, tuple[str, Any]] = {
    "left out": ("[training]\nsteps = 3\n[parallelism]\n", Full(every=2, first=1)),
    "off": ("[activation_checkpoint]\nmode = 'none'\n", None),
    "full": ("[activation_checkpoint]\nmode = 'full'\nearly_stop = true\n", Full()),
    "every third": (
        "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '3'\n",
        Full(every=3, first=2),
    ),
    "by operator": (
        "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = 'op'\n",
        Selective(
            save=[
                *("_c10d_functional.reduce_scatter_tensor", "aten.max", "attention", "compiled"),
                every_second("aten.mm"),
            ]
        ),
    ),
    "the compiler's": (
        "[activation_checkpoint]\nmode = 'memory_budget'\nmemory_budget = 0.3\n[compile]\nenable = true\n",
        CompilerBudget(0.3),
    ),
}
FILES = {
    "axolotl": (axolotl, AXOLOTL, "config.yml"),
    "prime-rl": (prime_rl, PRIME_RL, "rl.toml"),
    "NeMo Automodel": (nemo, NEMO, "recipe.yaml"),
    "torchtitan": (torchtitan, TITAN, "train.toml"),
}
CASES = [(system, case) for system, (_, cases, _) in FILES.items() for case in cases]


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(("system", "case"), CASES)
def test_a_file_becomes_a_mode_by_its_own_system_and_by_recognition(system: str, case: str, tmp_path: Path) -> None:
    module, cases, name = FILES[system]
    text, mode = cases[case]
    path = written(tmp_path, name, text)
    found = module.from_config(path)
    assert found.mode == mode
    assert found == read_config(str(path))
    assert found.system == system
    assert (found.line is None) is (mode is None)
    if isinstance(mode, CompilerBudget):
        with eval(found.line, {"actmem": actmem, "model": nn.Linear(2, 2)}) as applied:
            assert applied.budget == mode
    elif found.line is not None:
        made = eval(found.line, {"actmem": Called(), "model": None})
        assert made == (mode, dict(found.options)), "the line that is printed says the same"
    assert all(value is not None for value in found.said.values())
    assert str(found).startswith(f"{system}:")


class Called:
    """actmem, whose `apply` tells what it was called with."""

    def __getattr__(self, name: str) -> Any:
        return getattr(actmem, name)

    def apply(self, model: Any, mode: Any, **options: Any) -> Any:
        return mode, options


REFUSED = {
    "a value of axolotl": ("a.yml", f"{ON}activation_offloading: host\n", "activation_offloading: 'host' is not known"),
    "1 for true": ("a.yml", f"{ON}activation_offloading: 1\n", "activation_offloading: 1 is not known"),
    "offloading without checkpointing": (
        "a.yml",
        "base_model: a/b\nactivation_offloading: true\n",
        "activation_offloading needs gradient_checkpointing: true",
    ),
    "two that do not go together": (
        "a.yml",
        f"{ON}activation_offloading: true\nselective_checkpointing: true\n",
        "cannot be combined with selective_checkpointing",
    ),
    "a key of selective": (
        "a.yml",
        f"{ON}selective_checkpointing:\n  saves: [attention]\n",
        "a key of selective_checkpointing: 'saves' is not known.*Did you mean 'save'",
    ),
    "no counterpart": (
        "a.yml",
        f"{ON}selective_checkpointing:\n  save_matmul_min_k: 256\n",
        "save_matmul_min_k has no counterpart",
    ),
    "not a table": ("a.yml", f"{ON}selective_checkpointing: attention\n", "is not a table"),
    "a mode of prime-rl": ("a.toml", "[model.ac]\nmode = 'some'\n", "mode: 'some' is not known. Permitted: full, sel"),
    "a key of prime-rl": ("a.toml", "[model.ac]\nfrequency = 2\n", "a key of ac: 'frequency' is not known"),
    "a target": ("a.toml", "[model.ac]\nmode = 'selective'\ntargets = ['nrom']\n", "Did you mean 'norm'"),
    "two kinds of targets": (
        "a.toml",
        "[model.ac]\nmode = 'selective'\ntargets = ['norm', 'aten::mm']\n",
        "Use only one kind",
    ),
    "a number": ("a.toml", "[model.ac]\nfreq = 0\n", "freq = 0 is not permitted"),
    "a value of NeMo": ("a.yaml", "distributed:\n  activation_checkpointing: some\n", "'some' is not known. Permitted"),
    "a scope of NeMo": (
        "a.yaml",
        "distributed:\n  activation_checkpointing: true\n  activation_checkpointing_scope: text\n",
        "text is not known. Permitted: all, language",
    ),
    "a key of torchtitan": (
        "a.toml",
        "[activation_checkpoint]\nmod = 'full'\n",
        "'mod' is not known.*Did you mean 'mode'",
    ),
    "an option of torchtitan": (
        "a.toml",
        "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = 'ops'\n",
        "selective_ac_option = 'ops' is not known",
    ),
    "a budget without the compiler": (
        "a.toml",
        "[activation_checkpoint]\nmode = 'memory_budget'\n",
        r"needs \[compile\] enable = true",
    ),
    "nobody's": ("a.yaml", "learning_rate: 3\n", "is not recognised. Expected a configuration of axolotl, NeMo"),
    "not a file": ("missing.toml", None, "cannot be read"),
    "not TOML": ("a.toml", "[model\n", "cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, text, says = REFUSED[case]
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ModeError, match=says):
        read_config(path)


def test_a_file_of_another_system_is_sent_to_its_own_reader(tmp_path: Path) -> None:
    path = written(tmp_path, "rl.toml", "[model.ac]\n")
    with pytest.raises(ModeError, match=r"is a configuration of prime-rl. Write actmem.compat.prime_rl.from_config"):
        torchtitan.from_config(path)


def test_without_pyyaml_the_line_that_installs_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ModeError, match="pip install pyyaml"):
        axolotl.from_config(written(tmp_path, "config.yml", ON))


def test_torchtitans_flags_are_read_from_a_list_and_from_a_script_and_win_over_its_file(tmp_path: Path) -> None:
    flags = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option", "op"]
    by_list = torchtitan.from_config(arguments=flags)
    script = written(tmp_path, "run.sh", f"NGPU=8 ./run_train.sh {' '.join(flags)} --training.steps 3\n")
    assert by_list.mode == torchtitan.from_config(script).mode == TITAN["by operator"][1]
    path = written(tmp_path, "train.toml", "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = 'op'\n")
    assert torchtitan.from_config(path, ["--activation_checkpoint.mode", "full"]).mode == Full()


def test_nemos_scope_names_towers(tmp_path: Path) -> None:
    text = "distributed:\n  activation_checkpointing: true\n  activation_checkpointing_scope: [language, multimodal]\n"
    found = nemo.from_config(written(tmp_path, "recipe.yaml", text))
    assert found.options == {"collectives": "recompute", "scope": ["language", "vision", "audio"]}


def decisions(applied: Any) -> list[Any]:
    return [[(row.op, row.decision) for row in block.rows] for block in applied.trace().blocks]


def by_config(found: FromConfig) -> Any:
    def change(model: Any) -> Any:
        return actmem.apply(model, found.mode, **found.options)

    return change


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_nemos_selective_decides_as_its_function_does(name: str, tmp_path: Path) -> None:
    text = "distributed:\n  activation_checkpointing: selective\n"
    found = nemo.from_config(written(tmp_path, "recipe.yaml", text))
    ours = assert_trains_the_same(ZOO[name], by_config(found))
    theirs = assert_trains_the_same(
        ZOO[name], lambda m: nemo.apply_selective_checkpointing_to_layers(m, layers_of(m), False)
    )
    assert decisions(ours) == decisions(theirs)


@pytest.mark.parametrize("name", ["torchtitan_like", "torchtitan_moe"])
def test_torchtitans_selective_decides_as_its_function_does(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, "t.toml", TITAN["by operator"][0])
    config = torchtitan.ActivationCheckpoint(selective_ac_option="op")
    saved = {"attention", "compiled", "aten.mm", "aten.max", "_c10d_functional.reduce_scatter_tensor"}
    ours = assert_trains_the_same(ZOO[name], by_config(torchtitan.from_config(path)))
    theirs = assert_trains_the_same(ZOO[name], lambda m: torchtitan.apply_ac(m, config, op_sac_save_list=saved))
    assert decisions(ours) == decisions(theirs)


def test_prime_rls_targets_decide_as_its_function_does(tmp_path: Path) -> None:
    path = written(tmp_path, "rl.toml", PRIME_RL["targets"][0])
    config = prime_rl.ActivationCheckpointConfig(mode="selective", targets=["norm", "mlp"])
    ours = assert_trains_the_same(ZOO["llama"], by_config(prime_rl.from_config(path)))
    theirs = assert_trains_the_same(ZOO["llama"], lambda m: prime_rl.apply_ac(m, config))
    assert decisions(ours) == decisions(theirs)


@pytest.mark.parametrize("name", ["llama", "gemma3_sliding"])
def test_axolotls_selective_trains_as_plain(name: str, tmp_path: Path) -> None:
    found = axolotl.from_config(written(tmp_path, "c.yml", AXOLOTL["selective"][0]))
    assert assert_trains_the_same(ZOO[name], by_config(found)).report().recomputed_bytes > 0
