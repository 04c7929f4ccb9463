from pathlib import Path

import actmem.errors
from tests.children import run

PROGRAM = """
import sys, types

sys.modules["torch"] = None  # any import of torch now fails
package = types.ModuleType("actmem")  # the data layer alone, without the public names that need torch
package.__path__ = [sys.argv[1]]
sys.modules["actmem"] = package

from actmem import errors, modes, ops, plan

mode = modes.Selective(save=["attention", modes.every_second("matmul")])
made = plan.Plan(mode.rules(), ["layers.0"], "fingerprint", repr(mode))
assert plan.Plan.from_json(made.to_json()) == made
assert ops.matches("matmul", "aten.mm", "default")
assert issubclass(errors.PlanError, errors.ActmemError)
print(",".join(sorted(name for name, module in sys.modules.items() if name.partition(".")[0] == "torch" and module)))
"""


def test_modes_plans_operator_names_and_errors_work_where_torch_cannot_be_imported() -> None:
    folder = Path(actmem.errors.__file__).parent
    result = run("-c", PROGRAM, str(folder))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""
