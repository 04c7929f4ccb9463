"""Attention, norms and feed-forward compiled as parts of eager blocks: no more memory than under torch's checkpoint.

Each figure is of a process of its own, by the events of torch's allocator. See `part_peaks.py`.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.compile.part_peaks import peaks

MODELS = (
    *("llama", "mixtral", "qwen3_moe", "deepseek_v3", "gemma3_sliding", "vit", "torchtitan_moe", "moe_topk"),
    *("sized_dense", "sized_moe"),
)
BACKENDS = ("aot_eager", "inductor")
SMALL = (("small", "inductor"),)


def check(name: str, backend: str) -> None:
    found = peaks(name, backend)
    plain, full, selective = found["plain"], found["full"], found["selective"]
    assert full["peak_bytes"] <= 1.02 * found["torch's checkpoint"]["peak_bytes"]
    assert selective["peak_bytes"] <= found["torch's selective"]["peak_bytes"]
    for ours in (full, selective):
        assert ours["digest"] == plain["digest"], "gradients are those of the compiled model, bit for bit"
        assert ours["calls"] == plain["calls"] + ours["replays"], "the report says how often graphs are called again"
        assert ours["graphs"][1] == ours["graphs"][-1], "nothing is compiled after the second step"
        assert ours["graphs"] == plain["graphs"], "nor more than without actmem"
    assert plain["calls"] > 0 and (full["replays"] > 0) is (backend == "inductor")


@pytest.mark.parametrize(("name", "backend"), SMALL)
def test_full_and_selective_take_no_more_than_torchs_forms_and_calls_are_those_of_the_report(
    name: str, backend: str
) -> None:
    check(name, backend)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [pair for pair in product(MODELS, BACKENDS) if pair not in SMALL])
def test_no_model_takes_more_than_under_torchs_forms(name: str, backend: str) -> None:
    check(name, backend)
