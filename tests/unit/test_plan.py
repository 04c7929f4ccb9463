import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from actmem.decision_rules import TARGETS, Rule, Slices, check_rules
from actmem.decisions import Decision
from actmem.errors import ModeError, PlanError
from actmem.ops import GROUPS
from actmem.plan import FitRecord, Plan
from actmem.shapes import TensorShape

PLAN = Plan(
    [
        Rule("offload", module="*.mlp", op="matmul", layers="0:24"),
        Rule("save", op="aten.mm.default", nth="::2", min_bytes=1024),
        Rule("recompute", target="norm"),
        Rule("save"),
    ],
    ["model.layers.0", "model.layers.1", "model.layers.2"],
    "9f2c41",
    "Rules([...])",
)


def refusal(make: Any) -> str:
    with pytest.raises(ModeError) as caught:
        make()
    return f"{type(caught.value).__name__}: {caught.value}"


# --- slices -----------------------------------------------------------------------------------------------------------

bounds = st.none() | st.integers(-12, 12)


@settings(deadline=None)  # a shared machine may pause
@given(bounds, bounds, st.none() | st.integers(1, 5), st.integers(0, 10))
def test_slices_select_what_python_slices_select(
    start: int | None, stop: int | None, step: int | None, length: int
) -> None:
    def write(bound: int | None) -> str:
        return "" if bound is None else str(bound)

    text = f"{write(start)}:{write(stop)}" + ("" if step is None else f":{step}")
    try:
        slices = Slices.parse(text)
    except ModeError:
        # Refused only where no length at all would give an element.
        assert all(not range(n)[start:stop:step] for n in range(40))
        return
    assert [i for i in range(length) if slices.contains(i, length)] == list(range(length))[start:stop:step]


@settings(deadline=None)  # a shared machine may pause
@given(st.integers(-8, 8), st.integers(1, 8))
def test_a_single_index_selects_what_python_indexing_selects(index: int, length: int) -> None:
    expected = [list(range(length))[index]] if -length <= index < length else []
    slices = Slices.parse(str(index))
    assert [i for i in range(length) if slices.contains(i, length)] == expected


def test_parts_are_joined_and_spaces_are_allowed() -> None:
    slices = Slices.parse("0, 4:6 ,-2:")
    assert [i for i in range(10) if slices.contains(i, 10)] == [0, 4, 5, 8, 9]


def test_without_a_length_a_count_can_go_on_for_ever() -> None:
    slices = Slices.parse("1::3")
    assert [i for i in range(9) if slices.contains(i)] == [1, 4, 7]
    assert slices.contains(3 * 10**8 + 1)
    with pytest.raises(ValueError, match="needs a length"):
        Slices.parse("-2:").contains(3)


@pytest.mark.parametrize(
    "text", ["", "a", "1-3", "1:2:0", "::-1", "4:2", "3:3", ":0", "-2:-4", "1,,2", "0:1:2:3", "٣", "1_0"]
)
def test_text_that_is_no_slice_or_selects_nothing_is_refused(text: str, snapshot: SnapshotAssertion) -> None:
    assert refusal(lambda: Slices.parse(text)) == snapshot


# --- rules ------------------------------------------------------------------------------------------------------------


def test_a_rule_prints_as_the_line_that_makes_it() -> None:
    for rule in PLAN.rules:
        assert eval(repr(rule)) == rule
    assert repr(PLAN.rules[0]) == "Rule('offload', layers='0:24', module='*.mlp', op='matmul')"


def test_rules_are_frozen_hashable_and_equal_by_value() -> None:
    rule = Rule("save", op="matmul")
    assert rule == Rule("save", op="matmul") != Rule("save", op="batched_matmul")
    assert len({rule, Rule("save", op="matmul")}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.op = "attention"  # type: ignore[misc]


def test_every_selector_alone_makes_a_rule_conditional() -> None:
    selectors: list[dict[str, Any]] = [
        {"layers": "0"}, {"module": "*"}, {"target": "mlp"}, {"op": "*"}, {"nth": "0"}, {"min_bytes": 1},
    ]  # fmt: skip
    assert [Rule("save", **selector).is_default for selector in selectors] == [False] * len(selectors)
    assert Rule("save").is_default


def test_selectors_are_keywords_only() -> None:
    with pytest.raises(TypeError):
        Rule("save", "0:24")  # type: ignore[misc]


@pytest.mark.parametrize(
    "arguments",
    [
        {"decision": "sav"},
        {"decision": None},
        {"layers": 3},
        {"layers": ""},
        {"layers": "x"},
        {"module": "*.mlp::matmul"},
        {"module": 7},
        {"target": "nrom"},
        {"op": "mm"},
        {"op": "matmull"},
        {"op": "*.mlp::matmul"},
        {"op": "aten."},
        {"nth": "-2:"},
        {"nth": "x"},
        {"min_bytes": -1},
        {"min_bytes": 1.5},
        {"min_bytes": True},
    ],
    ids=repr,
)
def test_a_field_with_a_bad_value_is_refused_with_its_repair(
    arguments: dict[str, Any], snapshot: SnapshotAssertion
) -> None:
    decision = arguments.pop("decision", "save") if "decision" in arguments else "save"
    assert refusal(lambda: Rule(decision, **arguments)) == snapshot


@pytest.mark.parametrize(
    "rules",
    [
        [],
        "save",
        Rule("save"),
        [Rule("save"), "save"],
        [Rule("recompute", op="matmul")],
        [Rule("recompute"), Rule("save")],
        [Rule("save", layers="0"), Rule("recompute"), Rule("save", op="matmul"), Rule("save")],
    ],
    ids=str,
)
def test_rules_end_in_a_default_and_each_can_match(rules: Any, snapshot: SnapshotAssertion) -> None:
    assert refusal(lambda: check_rules(rules)) == snapshot
    assert refusal(lambda: Plan(rules, ["a"], "f", "m")).endswith(refusal(lambda: check_rules(rules)))


# --- plans ------------------------------------------------------------------------------------------------------------

slice_texts = st.sampled_from(["0", "::2", "0:24", "0,4:6", "3::4"])
rules = st.builds(
    Rule,
    st.sampled_from(Decision),
    layers=st.none() | slice_texts | st.just("-2:"),
    module=st.none() | st.text(min_size=1).filter(lambda text: text.strip() and "::" not in text),
    target=st.none() | st.sampled_from(TARGETS),
    op=st.none() | st.sampled_from([*GROUPS, "aten.mm", "aten::mm", "aten.mm.default", "aten.*"]),
    nth=st.none() | slice_texts,
    min_bytes=st.integers(0, 2**63),
)
plans = st.builds(
    lambda conditional, default, blocks, fingerprint, mode: Plan(
        [*(rule for rule in conditional if not rule.is_default), Rule(default)], blocks, fingerprint, mode
    ),
    st.lists(rules, max_size=5),
    st.sampled_from(Decision),
    st.lists(st.text(), max_size=4),
    st.text(),
    st.text(),
)


@settings(deadline=None)  # a shared machine may pause
@given(plans)
def test_a_plan_read_back_is_the_same_plan(plan: Plan) -> None:
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text


@settings(deadline=None)  # a shared machine may pause
@given(plans)
def test_a_plan_prints_a_line_for_every_rule(plan: Plan) -> None:
    assert str(plan).count("everything") >= 1
    assert len(str(dataclasses.replace(plan, mode="m", fingerprint="f", blocks=())).splitlines()) >= 3 + len(plan.rules)


def test_a_plan_prints_as_a_table(snapshot: SnapshotAssertion) -> None:
    assert str(PLAN) == snapshot


def test_the_file_form_is_stable(snapshot: SnapshotAssertion) -> None:
    assert PLAN.to_json() == snapshot


def test_save_and_load_go_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == Plan.load(str(path)) == PLAN


def test_a_plan_can_be_written_by_hand_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        """
        version = 1
        mode = "Rules([...])"
        fingerprint = "9f2c41"
        blocks = ["model.layers.0", "model.layers.1", "model.layers.2"]

        [[rules]]
        decision = "offload"
        module = "*.mlp"
        op = "matmul"
        layers = "0:24"

        [[rules]]
        decision = "save"
        op = "aten.mm.default"
        nth = "::2"
        min_bytes = 1024

        [[rules]]
        decision = "recompute"
        target = "norm"

        [[rules]]
        decision = "save"
        """
    )
    assert Plan.load(path) == PLAN


def changed(**changes: Any) -> str:
    """Write PLAN with keys changed; None takes a key out."""
    document = json.loads(PLAN.to_json()) | changes
    return json.dumps({key: value for key, value in document.items() if value is not None})


UNREADABLE = {
    "cut_off.json": PLAN.to_json()[:200],
    "cut_off.toml": 'version = 1\n[[rules]]\ndecision = "sa',
    "empty.json": "",
    "nested.json": "[" * 200_000,
    "newer.json": changed(version=2),
    "no_version.json": changed(version=None),
    "text_version.json": changed(version="1"),
    "true_version.json": changed(version=True),
    "list.json": "[1, 2]",
    "config.json": '{"hidden_size": 64, "num_layers": 2}',
    "unknown_key.json": changed(forecast={"peak_bytes": 1}),
    "unknown_rule_key.json": changed(rules=[{"decision": "save", "layer": "0"}, {"decision": "save"}]),
    "no_decision.json": changed(rules=[{"layers": "0"}, {"decision": "save"}]),
    "no_blocks.json": changed(blocks=None),
    "bad_blocks.json": changed(blocks=["a", 3]),
    "bad_layers.json": changed(rules=[{"decision": "save", "layers": "x"}, {"decision": "save"}]),
    "number_layers.json": changed(rules=[{"decision": "save", "layers": 3}, {"decision": "save"}]),
    "text_bytes.json": changed(rules=[{"decision": "save", "min_bytes": "1"}, {"decision": "save"}]),
    "no_default.json": changed(rules=[{"decision": "save", "op": "matmul"}]),
    "twice.json": '{"version": 1, "version": 1, "rules": []}',
    "plan.yaml": "version: 1",
    "bad_decision.json": changed(rules=[{"decision": "sav"}]),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_is_no_readable_plan_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(UNREADABLE[name])
    with pytest.raises(PlanError) as caught:
        Plan.load(name)
    assert str(caught.value) == snapshot


def test_a_number_too_long_for_python_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot be read as JSON"):
        Plan.from_json(f'{{"version": {"9" * 5000}}}')


def test_every_cut_of_a_plan_file_is_refused() -> None:
    text = PLAN.to_json().rstrip()
    for length in range(len(text)):
        with pytest.raises(PlanError):
            Plan.from_json(text[:length])


def test_files_that_cannot_be_read_or_written_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.json").mkdir()
    Path("image.json").write_bytes(b"\x89PNG")
    attempts = {
        "missing": lambda: Plan.load("missing.json"),
        "folder": lambda: Plan.load("folder.json"),
        "image": lambda: Plan.load("image.json"),
        "toml out": lambda: PLAN.save("plan.toml"),
        "no such folder": lambda: PLAN.save("nowhere/plan.json"),
    }
    assert {name: refusal(attempt) for name, attempt in attempts.items()} == snapshot


def test_a_plan_of_another_version_cannot_be_made() -> None:
    with pytest.raises(ModeError, match="version = 2 is not known"):
        dataclasses.replace(PLAN, version=2)


# --- shapes -----------------------------------------------------------------------------------------------------------

PREDICTED = dataclasses.replace(
    PLAN,
    predicted=FitRecord(
        *(2**20, 2**21, 1.0, 0, 1.0, 0.0, "h100-80gb", "none"),
        shapes=(TensorShape("input_ids", "int64", (1, 128)), TensorShape("a name", "bool", ())),
        calls=((TensorShape("0", "float32", (4, 32)),),),
    ),
)


def test_a_plan_file_holds_shapes_as_text_and_gives_them_back_as_data() -> None:
    document = json.loads(PREDICTED.to_json())["predicted"]
    assert document["shapes"] == ["input_ids int64 [1, 128]", "a name bool []"]
    assert document["calls"] == [["0 float32 [4, 32]"]]
    assert Plan.from_json(PREDICTED.to_json()) == PREDICTED


def test_a_shape_that_cannot_be_read_is_refused_with_its_place() -> None:
    text = PREDICTED.to_json().replace("0 float32 [4, 32]", "float32 x 4")
    assert refusal(lambda: Plan.from_json(text)) == (
        "PlanError: the plan text: predicted.calls[0][0]: 'float32 x 4' does not describe a tensor. Expected "
        "'input_ids int64 [1, 128]' or the like."
    )
