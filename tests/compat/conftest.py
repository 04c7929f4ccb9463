from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)  # a set of the process: no test leaves something in it
def ignored(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """What torch's selective checkpointing leaves out of its count, for this test alone."""
    own: set[Any] = set(torch.utils.checkpoint.SAC_IGNORED_OPS)
    monkeypatch.setattr(torch.utils.checkpoint, "SAC_IGNORED_OPS", own)
    return own
