"""Tensor, sequence, context, expert and pipeline parallel, and sharded experts: bitwise what the ranks give plain."""

from __future__ import annotations

import pytest

from tests.distributed import cases_parallel, cases_pipeline, cases_sharded
from tests.distributed.ranks import Outcomes, run

DEFAULT = (*cases_sharded.DEFAULT, *cases_parallel.DEFAULT, *cases_pipeline.DEFAULT)
SLOW = (*cases_sharded.SLOW, *cases_parallel.SLOW, *cases_pipeline.SLOW)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run(DEFAULT, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def slow_outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run(SLOW, tmp_path_factory.mktemp("slow_ranks"))


@pytest.mark.parametrize("name", [c.__name__ for c in DEFAULT])
def test_two_ranks(name: str, outcomes: Outcomes) -> None:
    assert outcomes[name] == ["", ""], "\n".join(outcomes[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [c.__name__ for c in SLOW])
def test_two_ranks_further(name: str, slow_outcomes: Outcomes) -> None:
    assert slow_outcomes[name] == ["", ""], "\n".join(slow_outcomes[name])
