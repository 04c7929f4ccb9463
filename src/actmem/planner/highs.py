"""Linear and integer programs, solved by HiGHS. The only file that imports highspy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from actmem.planner.work import Work, nodes_for

__all__ = ["Outcome", "Program"]

_INFINITY = float("inf")
_MOST = 500_000
"""Simplex iterations that no integer search goes far beyond."""
_WIDE = 500
"""Columns from which a linear program is solved as it is: to simplify it would take longer than to solve it."""
_OPTIONS: dict[str, Any] = {
    "output_flag": False,
    # One thread, a fixed seed and limits in nodes: the same program has the same solution on every machine.
    "threads": 1,
    "parallel": "off",
    "random_seed": 0,
    "mip_rel_gap": 0.0,
    # The programs here are small: what helps on large ones costs more than the search itself.
    "mip_allow_restart": False,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
}


@dataclass(frozen=True)
class Outcome:
    """What HiGHS found."""

    values: list[float]
    """The value of each column; empty if nothing was found."""
    duals: list[float]
    """The dual of each row, for a program without integer columns."""
    objective: float
    bound: float
    """Lower bound on every solution."""
    optimal: bool
    infeasible: bool


class Program:
    """A program to be minimised, built column by column and row by row.

    >>> program = Program()
    >>> x, y = program.column(-1.0, upper=2.5, whole=True), program.column(-1.0, upper=2.0)
    >>> program.row({x: 1.0, y: 1.0}, upper=3.5)
    >>> found = program.solve(Work())
    >>> found.optimal, found.objective
    (True, -3.5)
    """

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._whole: list[bool] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []
        self._starts = [0]
        self._index: list[int] = []
        self._value: list[float] = []

    def column(self, cost: float = 0.0, *, lower: float = 0.0, upper: float = _INFINITY, whole: bool = False) -> int:
        """Add a column and return its number."""
        self._cost.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        self._whole.append(whole)
        return len(self._cost) - 1

    def charge(self, column: int, cost: float) -> None:
        """Add to the cost of a column."""
        self._cost[column] += cost

    def row(self, terms: dict[int, float], *, lower: float = -_INFINITY, upper: float = _INFINITY) -> None:
        """Add a row."""
        self.row_of(terms, terms.values(), lower=lower, upper=upper)

    def row_of(
        self,
        columns: Iterable[int],
        amounts: Iterable[float],
        *,
        lower: float = -_INFINITY,
        upper: float = _INFINITY,
    ) -> None:
        """Add a row, given its columns and how much of each."""
        self._row_lower.append(lower)
        self._row_upper.append(upper)
        self._index.extend(columns)
        self._value.extend(amounts)
        self._starts.append(len(self._index))

    def solve(self, work: Work, *, relaxed: bool = False, near: float = 0.0, allowance: int = _MOST) -> Outcome:
        """Minimise.

        Args:
            work: the account to which this is charged.
            relaxed: let all columns take fractional values.
            near: accept a solution that is at most this far above the minimum.
            allowance: about how many simplex iterations an integer search may take.
        """
        whole = any(self._whole) and not relaxed
        highs: Any = highspy.Highs()
        for name, value in _OPTIONS.items():
            highs.setOptionValue(name, value)
        highs.setOptionValue("time_limit", max(0.01, work.seconds_left))
        highs.setOptionValue("mip_max_nodes", nodes_for(allowance, len(self._cost) + len(self._row_lower)))
        highs.setOptionValue("mip_abs_gap", max(1e-7, near))
        if not whole and len(self._cost) >= _WIDE:
            highs.setOptionValue("presolve", "off")
        highs.passModel(self._model(whole))
        highs.run()
        info, solution, status = highs.getInfo(), highs.getSolution(), highs.getModelStatus()
        work.count(iterations=max(0, int(info.simplex_iteration_count)), terms=len(self._index))
        if status == highspy.HighsModelStatus.kTimeLimit:
            work.stop()
        found = info.primal_solution_status == int(highspy.kSolutionStatusFeasible)
        optimal = status == highspy.HighsModelStatus.kOptimal
        objective = float(info.objective_function_value) if found else _INFINITY
        return Outcome(
            values=list(solution.col_value) if found else [],
            duals=list(solution.row_dual) if optimal and not whole else [],
            objective=objective,
            bound=float(info.mip_dual_bound) if whole else objective if optimal else -_INFINITY,
            optimal=optimal,
            infeasible=status == highspy.HighsModelStatus.kInfeasible,
        )

    def _model(self, whole: bool) -> Any:
        lp: Any = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self._cost), len(self._row_lower)
        lp.col_cost_ = np.array(self._cost, dtype=float)
        lp.col_lower_, lp.col_upper_ = np.array(self._lower, dtype=float), np.array(self._upper, dtype=float)
        lp.row_lower_, lp.row_upper_ = np.array(self._row_lower, dtype=float), np.array(self._row_upper, dtype=float)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self._starts, dtype=np.int32)
        lp.a_matrix_.index_ = np.array(self._index, dtype=np.int32)
        lp.a_matrix_.value_ = np.array(self._value, dtype=float)
        if whole:
            kinds: Any = highspy.HighsVarType
            lp.integrality_ = [kinds.kInteger if w else kinds.kContinuous for w in self._whole]
        return lp
