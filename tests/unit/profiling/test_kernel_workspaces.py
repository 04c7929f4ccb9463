"""What a kernel takes for itself is found by running it: at least as much as it takes in any step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from actmem.measuring import workspace_bytes
from actmem.profiling import KernelWorkspaces
from actmem.torchcompat import log_allocations, logged_allocations

ROWS, WIDTH, OUT, EXPERTS = 296, 120, 96, 5
GROUPED = torch.ops.aten._grouped_mm.default
FORMS = {
    "rows by weights": ((ROWS, WIDTH), (EXPERTS, WIDTH, OUT)),
    "columns by rows": ((WIDTH, ROWS), (ROWS, OUT)),
    "weights by columns": ((EXPERTS, OUT, WIDTH), (WIDTH, ROWS)),
}


def taken(one: Tensor, other: Tensor, sizes: list[int]) -> int:
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    assert log_allocations()
    result = GROUPED(one, other, ends)
    changes = [change for change in logged_allocations() if isinstance(change, int)]
    assert result.numel()
    return workspace_bytes(changes)


@pytest.mark.parametrize("form", FORMS)
def test_a_grouped_product_takes_no_more_however_its_rows_are_routed(form: str) -> None:
    one, other = (torch.zeros(shape, dtype=torch.bfloat16) for shape in FORMS[form])
    found = KernelWorkspaces()
    most = found.taken_by(GROUPED, (one, other, torch.zeros(EXPERTS, dtype=torch.int32)), {})
    assert not found.unknown
    for first in (0, 1, 41, 59, 64, 100, 200, 255, 256, 283, ROWS):
        rest = ROWS - first
        assert taken(one, other, [first, rest // 3, 0, rest // 2, rest - rest // 3 - rest // 2]) <= most
