"""How much a search has done, in units that are the same on every machine.

NOTE [ Work, not seconds ]
The same profile and the same budget give the same plan, on a fast machine and on a busy one. So what a search may spend
is counted, not timed: in simplex iterations of HiGHS, and what comes with them. HiGHS cannot limit an integer search by
iterations, only by nodes, so an allowance is divided by what a node takes on average, and a mix of layers that is so
large that its first node takes many times the allowance is not tried. HiGHS itself runs on one thread and with a fixed
seed, and is then deterministic.

The clock is read in one place, here, for `time_limit`: an emergency brake. Once it has passed, the search returns the
best plan so far, and `stopped` says so wherever the plan is shown. A search that it did not stop never depended on it.
"""

from __future__ import annotations

from time import perf_counter

__all__ = ["Work", "nodes_for"]

_ITERATIONS_OF_A_NODE = 50
_ITERATIONS_OF_A_PROGRAM = 20
"""What it takes to set up and start any program."""
_TERMS_OF_AN_ITERATION = 200
"""How many terms of a program are set up in the time of one iteration."""


class _Brake:
    def __init__(self, time_limit: float) -> None:
        self.deadline = perf_counter() + time_limit
        self.pulled = False


class Work:
    """What one search has done, and its emergency brake. See NOTE [ Work, not seconds ].

    >>> work = Work(time_limit=60.0)
    >>> work.count(iterations=30, terms=400)
    >>> work.done, work.stopped
    (52, False)
    """

    def __init__(self, time_limit: float = float("inf")) -> None:
        self.done = 0
        """In simplex iterations."""
        self._began = perf_counter()
        self._brake = _Brake(time_limit)

    def apart(self) -> Work:
        """Return the work of a search inside this one: counted from zero, under the same brake."""
        inner = Work()
        inner._brake = self._brake
        return inner

    def count(self, *, iterations: int, terms: int) -> None:
        """Add a solved program with this many terms."""
        self.done += iterations + _ITERATIONS_OF_A_PROGRAM + terms // _TERMS_OF_AN_ITERATION

    @property
    def stopped(self) -> bool:
        """Whether the time limit has passed."""
        if self.seconds_left <= 0:
            self.stop()
        return self._brake.pulled

    @property
    def was_stopped(self) -> bool:
        """Whether the time limit was reached while there was still something to do."""
        return self._brake.pulled

    def stop(self) -> None:
        """Note that the time limit has cut something short."""
        self._brake.pulled = True

    @property
    def seconds_left(self) -> float:
        """Seconds until the brake."""
        return self._brake.deadline - perf_counter()

    @property
    def seconds_spent(self) -> float:
        """Seconds since it began, for display."""
        return perf_counter() - self._began


def nodes_for(iterations: int, size: int) -> int:
    """Return how many nodes of an integer search an allowance of simplex iterations corresponds to.

    Args:
        iterations: the allowance.
        size: the rows and columns of the program. In small ones a node takes few iterations.

    >>> nodes_for(500, 1000), nodes_for(500, 45), nodes_for(0, 45)
    (10, 33, 1)
    """
    return max(1, iterations // min(_ITERATIONS_OF_A_NODE, max(5, size // 3)))
