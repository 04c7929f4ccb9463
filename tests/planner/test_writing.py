"""Rules that are written for decisions say the same, whatever the decisions, and take what is simulated."""

from __future__ import annotations

import random
from typing import Any

import pytest

from actmem.decision_rules import Rule
from actmem.decisions import Decision
from actmem.plan import Plan
from actmem.planner.rules_writer import write_rules
from actmem.profiles import Profile
from actmem.simulation.plan_effect import decisions, follow
from actmem.simulation.simulator import simulate
from tests.planner.steps import zoo
from tests.zoo import ZOO


def drawn(profile: Profile, chance: random.Random, *, by_layer: bool) -> list[list[Decision]]:
    """Draw decisions: the same for equal layers, or for each block one of two."""
    share = chance.choice([0.1, 0.3, 0.6])
    known: dict[Any, list[Decision]] = {}
    found: list[list[Decision]] = []
    for layer in profile.layers:
        # A block that is called several times in a step has one plan.
        key = layer.path if by_layer else layer.kind
        if key not in known or len(known[key]) != len(layer.calls):
            known[key] = [Decision.SAVE if chance.random() < share else Decision.RECOMPUTE for _ in layer.calls]
        found.append(known[key])
    return found


def check(name: str, seed: int) -> None:
    training = zoo(name)
    profile = training.profile(fake=False)
    chance = random.Random(seed)
    for by_layer in (False, True):
        wanted = drawn(profile, chance, by_layer=by_layer)
        plan = Plan(write_rules(profile, wanted), profile.blocks, profile.fingerprint, "drawn", None, True)
        assert not plan.rules[-1].selectors
        for layer, asked, said in zip(profile.layers, wanted, decisions(profile, plan), strict=True):
            matters = [n for n, call in enumerate(layer.calls) if call.makes]
            assert [asked[n] for n in matters] == [said[n] for n in matters], layer.path
        simulated = follow(profile, plan)
        assert simulated.peak_bytes == simulate(profile, wanted, exact=True).peak_bytes
        measured = training.measured(plan)
        flops = sum(
            profile.costs[layer.calls[n].cost].flops
            for layer, again in zip(profile.layers, simulated.replayed, strict=True)
            for n in again
        )
        assert (measured.peak_bytes, measured.replayed_flops) == (simulated.tensor_bytes, flops)


@pytest.mark.parametrize("name", ["llama", "unet", "transformer_encoder", "torchtitan_moe"])
def test_rules_say_what_was_decided_and_take_what_was_simulated(name: str) -> None:
    check(name, seed=0)


def test_offloading_everything_is_one_rule_for_blocks_of_one_kind() -> None:
    profile = zoo("llama").profile(fake=False)
    everything = [[Decision.OFFLOAD] * len(layer.calls) for layer in profile.layers]
    assert write_rules(profile, everything) == (Rule("offload"),)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ZOO)
def test_so_they_do_for_every_model(name: str, seed: int) -> None:
    check(name, seed)
