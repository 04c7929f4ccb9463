"""From rules to a decision at every operator of one block.

Most rules name operators only. Then the decision is one dictionary look-up per call (`Verdicts.known`). Rules that
count (`nth`), that name modules or targets, or that depend on size are asked each time.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any

from actmem import ops
from actmem.engine.operators import Operator
from actmem.engine.trees import tensors
from actmem.plan import Rule, Slices

__all__ = ["Verdicts", "resolve"]


@dataclasses.dataclass(frozen=True)
class _Resolved:
    """A rule as it stands in one block: the layer question answered, modules listed by path."""

    why: str
    """"save" to keep, "" to recompute."""
    op: str | None
    modules: frozenset[str] | None
    nth: Slices | None
    min_bytes: int
    index: int

    @property
    def static(self) -> bool:
        return self.modules is None and self.nth is None and not self.min_bytes


class Verdicts:
    """The decisions of one block."""

    def __init__(self, rules: tuple[_Resolved, ...], attention: frozenset[str]) -> None:
        self._rules = rules
        self._attention = attention
        """Paths of the attention modules: where attention runs unfused, it is found there."""
        self.known: dict[Operator, str] = {}
        """Operator -> "save" or "" (recompute), for operators whose decision never depends on anything else."""
        self._candidates: dict[str, tuple[tuple[_Resolved, bool], ...]] = {}
        """Operator name -> the rules that may match it, in order, and whether only as the second product of
        attention."""
        self._selected: dict[tuple[int, int], bool] = {}
        self.matched: set[int] = set()
        """Indices of the plan's rules that decided at least one operator."""
        self.unfused = False
        """Attention was seen to run unfused: modules must be followed."""

    @property
    def follows_modules(self) -> bool:
        """Tell whether a decision needs the path of the running module."""
        return self.unfused or any(r.modules is not None for r in self._rules)

    @property
    def keeps_everything(self) -> bool:
        """Tell whether no rule that can match here recomputes."""
        return all(r.why for r in self._rules)

    def new_counts(self) -> dict[Any, int]:
        """Return the counters of one block call."""
        return {}

    def decide(self, operator: Operator, address: str, counts: dict[Any, int], out: Any) -> str:
        """Return "save" to keep what this call makes, "" to recompute it. What never changes is noted in `known`."""
        candidates = self._candidates.get(operator.name)
        if candidates is None:
            candidates = self._candidates[operator.name] = self._find(operator)
            if len(candidates) == 1 and not operator.declared:
                self.known[operator] = candidates[0][0].why
        second = self._is_second_product(address, counts) if any(asks for _, asks in candidates) else False
        for rule, asks in candidates:
            if (asks and not second) or (rule.modules is not None and not _under(address, rule.modules)):
                continue
            if rule.min_bytes and sum(t.nbytes for t in tensors(out)) < rule.min_bytes:
                continue
            if rule.nth is not None:
                count = counts.get(rule.index, 0)
                counts[rule.index] = count + 1
                if not self._selects(rule, count):
                    continue
            self.matched.add(rule.index)
            return rule.why
        raise AssertionError("a plan ends with a rule without selectors")

    def _find(self, operator: Operator) -> tuple[tuple[_Resolved, bool], ...]:
        """List the rules that may match an operator, up to the first that surely does."""
        found: list[tuple[_Resolved, bool]] = []
        for rule in self._rules:
            if rule.op is None or ops.matches(rule.op, operator.packet, operator.overload):
                found.append((rule, False))
                if rule.static:
                    break
            elif rule.op == "attention" and self._attention and operator.packet in ops.GROUPS["batched_matmul"]:
                found.append((rule, True))
        return tuple(found)

    def _selects(self, rule: _Resolved, count: int) -> bool:
        found = self._selected.get((rule.index, count))
        if found is None:
            assert rule.nth is not None
            found = self._selected[rule.index, count] = rule.nth.contains(count)
        return found

    def _is_second_product(self, address: str, counts: dict[Any, int]) -> bool:
        """Tell whether a batched product is that of weights and values, in attention that runs unfused."""
        for path in self._attention:
            if _inside(address, path):
                self.unfused = True
                count = counts.get(path, 0)
                counts[path] = count + 1
                return count % 2 == 1
        return False


def resolve(
    rules: tuple[Rule, ...], *, layer: int, num_layers: int, modules: dict[str, str], roles: dict[str, tuple[str, ...]]
) -> Verdicts:
    """Resolve a plan's rules for one block.

    Args:
        rules: the plan's rules, in order.
        layer: the index of the block.
        num_layers: how many blocks there are.
        modules: relative path -> full path of every module in the block, the block itself as "".
        roles: target name -> relative paths of the modules in that role.
    """
    resolved: list[_Resolved] = []
    for index, rule in enumerate(rules):
        if rule.layers is not None and not Slices.parse(rule.layers).contains(layer, num_layers):
            continue
        where: frozenset[str] | None = None
        if rule.module is not None:
            where = frozenset(path for path, full in modules.items() if fnmatch.fnmatchcase(full, rule.module))
            if any(fnmatch.fnmatchcase(above, rule.module) for above in _ancestors(modules[""])):
                where = frozenset({""})
        if rule.target is not None:
            found = frozenset(roles.get(rule.target, ()))
            where = found if where is None else frozenset(p for p in modules if _under(p, where) and _under(p, found))
        if where is not None and not where:
            continue
        nth = None if rule.nth is None else Slices.parse(rule.nth)
        resolved.append(
            _Resolved("" if rule.decision == "recompute" else "save", rule.op, where, nth, rule.min_bytes, index)
        )
        if resolved[-1].op is None and resolved[-1].static:
            break
    return Verdicts(tuple(resolved), frozenset(roles.get("attention", ())))


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _inside(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(module + ".")


def _under(path: str, modules: frozenset[str]) -> bool:
    return any(_inside(path, m) for m in modules)
