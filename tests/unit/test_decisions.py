"""Decisions and reasons are words wherever they are written or printed, and members wherever they are asked for."""

import json
import pickle

import pytest
import torch
from torch import Tensor

import actmem
from actmem.decision_rules import Rule
from actmem.decisions import Decision, Reason
from actmem.engine import kept_by
from actmem.engine.operators import REASONS
from actmem.plan import Plan
from actmem.profiles import Profile


@pytest.mark.parametrize("decision", Decision)
def test_a_decision_may_be_written_as_a_word_and_is_a_member(decision: Decision) -> None:
    rule = Rule(str(decision), op="matmul")
    assert rule.decision is decision
    assert rule == Rule(decision, op="matmul") and repr(rule) == f"Rule({str(decision)!r}, op='matmul')"


@pytest.mark.parametrize("word", [*Decision, *Reason])
def test_a_member_is_compared_printed_and_written_as_its_word(word: Decision | Reason) -> None:
    plain = word.value
    assert type(plain) is str and word == plain and hash(word) == hash(plain)
    assert (str(word), repr(word), f"{word:<9}", "%s" % word) == (plain, repr(plain), f"{plain:<9}", plain)  # noqa: UP031
    assert json.dumps({word: word}, indent=2) == json.dumps({plain: plain}, indent=2)
    assert pickle.loads(pickle.dumps(word)) is word


def test_a_plan_that_is_read_back_has_members() -> None:
    plan = Plan([Rule("offload", op="matmul"), Rule("recompute", layers="0"), Rule("save")], ["a", "b"], "", "")
    read = Plan.from_json(plan.to_json())
    assert [rule.decision for rule in read.rules] == ["offload", "recompute", "save"]
    assert all(type(rule.decision) is Decision for rule in read.rules)


class Chooses(torch.nn.Linear):
    """A block whose choice is never computed again."""

    def forward(self, x: Tensor) -> Tensor:
        """Weigh the largest entries."""
        return x * super().forward(x).exp().topk(2).values.sum()


def test_a_profile_that_is_read_back_has_members() -> None:
    model = torch.nn.Sequential(*[Chooses(8, 8) for _ in range(3)])
    found = actmem.profile(model, (torch.randn(4, 8),), loss=torch.sum, optimizer=None)
    read = Profile.from_json(found.to_json())
    assert read == found and read.to_json() == found.to_json()
    reasons = {value.why for layer in read.layers for value in layer.values}
    reasons |= {call.never for layer in read.layers for call in layer.calls}
    assert reasons == {None, Reason.EXTERNAL, Reason.ROUTING}
    assert {type(why) for why in reasons if why is not None} == {Reason}


def test_what_the_plan_does_not_recompute_is_kept_and_every_other_reason_is_explained() -> None:
    assert [kept_by(decision) for decision in Decision] == [Reason.SAVED, None, Reason.OFFLOADED]
    assert REASONS.keys() == set(Reason) - {Reason.SAVED, Reason.OFFLOADED}
