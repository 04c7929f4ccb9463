"""Decide for each operator by the rules of a plan, and trace those decisions.

Most rules name operators only. Then the decision is one dictionary look-up per call (`Verdicts.known`). Rules that
count (`nth`), that name modules or targets, or that depend on size are asked each time.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from actmem import ops
from actmem.decision_rules import Rule, Slices
from actmem.decisions import Decision, Reason
from actmem.engine.operators import Operator
from actmem.engine.values import tensors
from actmem.torchcompat import compute_intensive, num_bytes

__all__ = ["Traced", "Tracer", "Verdicts", "log_once", "resolve", "subsumed"]

TARGET_OPERATORS = {"moe_act": "pointwise"}
"""Targets that are not a whole module, but the operators of one group in it."""

KERNEL_OUTSIDE = frozenset({"attn_proj"})
"""Targets that are attention modules without the attention kernel itself."""


@dataclasses.dataclass(frozen=True)
class _Resolved:
    """A rule resolved for one block: questions about the layer answered, modules listed by path."""

    decision: Decision
    ops: tuple[str, ...]
    """Selectors of operators that must all match."""
    modules: frozenset[str] | None
    nth: Slices | None
    min_bytes: int
    index: int
    target: str | None

    @property
    def static(self) -> bool:
        return self.modules is None and self.nth is None and not self.min_bytes

    @property
    def names_attention(self) -> bool:
        """Return whether the rule's only operator selector is attention, or includes it."""
        return len(self.ops) == 1 and "attention" in self.ops[0].split("|")

    def covers(self, operator: Operator) -> bool:
        """Return whether all of the rule's operator selectors match this operator."""
        return all(_is_selected(op, operator) for op in self.ops)


class Verdicts:
    """The decisions of one block."""

    def __init__(self, rules: tuple[_Resolved, ...], attention: frozenset[str]) -> None:
        self._rules = rules
        self._names_modules = any(r.modules is not None for r in rules)
        self._attention = attention
        """Paths of the attention modules: where attention runs unfused, it is found there."""
        asks = any(rule.names_attention or rule.target in KERNEL_OUTSIDE for rule in rules)
        self._counted = ops.GROUPS["batched_matmul"] if asks and attention else frozenset[str]()
        """Packets that are counted in attention modules whichever rule decides them: they show where attention is."""
        self.known: dict[Operator, Decision] = {}
        """The decision for an operator, where it never depends on anything else."""
        self._candidates: dict[str, tuple[tuple[_Resolved, str], ...]] = {}
        """Operator name -> the rules that may match it, in order, and which part of attention it must be for that."""
        self._selected: dict[tuple[int, int], bool] = {}
        self._looked: dict[str, bool] = {}
        self.matched: set[int] = set()
        """Indices of the plan's rules that decided at least one operator."""
        self.latest = -1
        """Index of the rule that decided last."""
        self.unfused = False
        """Attention was seen to run unfused: modules must be followed."""

    @property
    def follows_modules(self) -> bool:
        """Return whether a decision needs the path of the running module."""
        return self.unfused or self._names_modules

    @property
    def looks_into_modules(self) -> bool:
        """Return whether what the plan says of a part of the block is not what it says of the rest."""
        return any(r.modules is not None and r.decision is not self._rules[-1].decision for r in self._rules)

    def looks_inside(self, address: str) -> bool:
        """Return whether the plan tells a part of this module from the rest of it."""
        found = self._looked.get(address)
        if found is None:
            named = (m for r in self._rules for m in r.modules or () if m != address and _inside(m, address))
            found = self._looked[address] = self.looks_into_modules and next(named, None) is not None
        return found

    @property
    def keeps_everything(self) -> bool:
        """Return whether every rule that can match here saves, so that there is nothing to do."""
        return all(r.decision is Decision.SAVE for r in self._rules)

    @property
    def offloads(self) -> bool:
        """Return whether a rule that can match here offloads."""
        return any(r.decision is Decision.OFFLOAD for r in self._rules)

    @functools.cached_property
    def offloads_inputs(self) -> bool:
        """Return whether values that no operator of the block made are offloaded: the first rule about them decides."""
        for rule in self._rules:
            if rule.modules is None and rule.ops in ((), (ops.INPUT,)):
                self.matched.add(rule.index)
                return rule.decision is Decision.OFFLOAD
        return False

    @property
    def recomputes_everything(self) -> bool:
        """Return whether no rule that can match here saves."""
        return all(r.decision is Decision.RECOMPUTE for r in self._rules)

    @property
    def key(self) -> Any:
        """A key that is equal for two blocks of one class if the plan says the same for both."""
        return self._rules, self._attention

    def new_counts(self) -> dict[Any, int]:
        """Return the counters of one block call."""
        return {}

    def decide(self, operator: Operator, address: str, counts: dict[Any, int], out: Any) -> Decision:
        """Return what to do with the result of this call.

        Decisions that never change are noted in `known`.
        """
        candidates = self._candidates.get(operator.name)
        if candidates is None:
            candidates = self._candidates[operator.name] = self._find(operator)
            if len(candidates) == 1 and not operator.declared and operator.packet not in self._counted:
                self.known[operator] = candidates[0][0].decision
        if operator.packet in self._counted:
            self._count(address, counts)
        for rule, asks in candidates:
            if asks and not _fits(asks, self._place(operator, address, counts)):
                continue
            if rule.modules is not None and not _under(address, rule.modules):
                continue
            if rule.min_bytes and sum(map(num_bytes, tensors(out))) < rule.min_bytes:
                continue
            if rule.nth is not None:
                count = counts.get(rule.index, 0)
                counts[rule.index] = count + 1
                selected = self._selected.get((rule.index, count))
                if not (self._selects(rule, count) if selected is None else selected):
                    continue
            self.matched.add(rule.index)
            self.latest = rule.index
            return rule.decision
        raise AssertionError("a plan ends with a rule without selectors")

    def targets_of(self, operator: Operator, address: str, counts: dict[Any, int]) -> tuple[int, ...]:
        """List the rules whose target this call belongs to, whichever of them decided. Call it after `decide`."""
        found: list[int] = []
        for rule in self._rules:
            if rule.target is None or rule.modules is None or not rule.covers(operator):
                continue
            if rule.target in KERNEL_OUTSIDE and not _fits(_OUTSIDE, self._place(operator, address, counts)):
                continue
            if _under(address, rule.modules):
                found.append(rule.index)
        return tuple(found)

    def _find(self, operator: Operator) -> tuple[tuple[_Resolved, str], ...]:
        """List the rules that may match an operator, up to the first that surely does."""
        found: list[tuple[_Resolved, str]] = []
        for rule in self._rules:
            if rule.covers(operator):
                found.append((rule, _OUTSIDE if rule.target in KERNEL_OUTSIDE else ""))
                if rule.static:
                    break
            elif rule.names_attention and operator.packet in self._counted:
                found.append((rule, _RESULT))
        return tuple(found)

    def _selects(self, rule: _Resolved, count: int) -> bool:
        assert rule.nth is not None
        found = self._selected[rule.index, count] = rule.nth.contains(count)
        return found

    def _count(self, address: str, counts: dict[Any, int]) -> None:
        """Note a batched product of an attention module."""
        path = self._attention_around(address)
        if path is not None:
            self.unfused = True
            counts[path] = counts.get(path, 0) + 1

    def _place(self, operator: Operator, address: str, counts: dict[Any, int]) -> int:
        """Return which part of attention a call is. Call it after counting the call.

        A fused kernel is one operator. Unfused attention is what lies between two batched products in an attention
        module: scores, mask, softmax, dropout, and the product of weights and values, which is its result.
        """
        if operator.packet in ops.GROUPS["attention"]:
            return _IN_KERNEL
        path = self._attention_around(address)
        num_products = 0 if path is None else counts.get(path, 0)
        if operator.packet in self._counted and path is not None:
            return _IN_KERNEL if num_products % 2 else _KERNEL_RESULT
        return _IN_KERNEL if num_products % 2 else _NOWHERE

    def _attention_around(self, address: str) -> str | None:
        return next((path for path in self._attention if _inside(address, path)), None)


_NOWHERE, _IN_KERNEL, _KERNEL_RESULT = 0, 1, 2
_RESULT, _OUTSIDE = "the result of attention", "outside the kernel"


def _fits(asked: str, place: int) -> bool:
    return place == (_KERNEL_RESULT if asked == _RESULT else _NOWHERE)


def _is_selected(op: str, operator: Operator) -> bool:
    return any(
        operator.packet in (compute_intensive() or ops.GROUPS[part])
        if part == "compute_intensive"
        else ops.matches(part, operator.packet, operator.overload)
        for part in op.split("|")
    )


def resolve(
    rules: tuple[Rule, ...],
    *,
    layer: int,
    num_layers: int,
    modules: dict[str, str],
    roles: dict[str, tuple[str, ...]],
    layer_type: str | None = None,
) -> Verdicts:
    """Resolve a plan's rules for one block.

    Args:
        rules: the plan's rules, in order.
        layer: the index of the block.
        num_layers: how many blocks there are.
        modules: relative path -> full path of every module in the block, the block itself as "".
        roles: target name -> relative paths of the modules in that role.
        layer_type: the model's name for the type of this block, if it has one.
    """
    resolved: list[_Resolved] = []
    for index, rule in enumerate(rules):
        if rule.layers is not None and not _slices(rule.layers).contains(layer, num_layers):
            continue
        if rule.layer_type is not None and not fnmatch.fnmatchcase(layer_type or "", rule.layer_type):
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
        selectors = (rule.op, TARGET_OPERATORS.get(rule.target or ""))
        resolved.append(
            _Resolved(
                decision=Decision(rule.decision),
                ops=tuple(op for op in selectors if op is not None),
                modules=where,
                nth=None if rule.nth is None else _slices(rule.nth),
                min_bytes=rule.min_bytes,
                index=index,
                target=rule.target,
            )
        )
        if not resolved[-1].ops and resolved[-1].static:
            break
    return Verdicts(tuple(resolved), frozenset(roles.get("attention", ())))


@functools.cache
def _slices(text: str) -> Slices:
    """Read slice text, once for all layers."""
    return Slices.parse(text)


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _inside(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(module + ".")


def _under(path: str, modules: frozenset[str]) -> bool:
    return any(_inside(path, m) for m in modules)


_logger = logging.getLogger("actmem.decisions")


@dataclass(frozen=True)
class Traced:
    """One decision: an address, what the plan says there, and which of its rules."""

    module: str
    """Path of the module inside the block; "" is the block's own forward."""
    op: str
    """The operator with its overload, such as `aten.mm.default`."""
    nth: int
    """How many calls of this operator the module had made before."""
    decision: Decision
    rule: int
    """Index of the rule that decided."""
    never: Reason | None
    """Why the operator is never replayed, whatever the plan says; None if it may be."""
    targets: tuple[int, ...]
    """Indices of all rules whose target this address belongs to."""
    num_bytes: int
    """What the call made."""

    @property
    def address(self) -> tuple[str, str, int]:
        """Where: module, operator and count."""
        return self.module, self.op, self.nth


class Tracer:
    """Decide as `Verdicts` does, and record each decision. Takes its place while a call is observed."""

    def __init__(self, verdicts: Verdicts, *, reissue: bool = False) -> None:
        self._verdicts = verdicts
        self._reissue = reissue
        """Functional collectives may run again."""
        self._seen: Counter[tuple[str, str]] = Counter()
        self.known: dict[Operator, Decision] = {}
        """Empty: every call asks, so that every call is recorded."""
        self.rows: list[Traced] = []

    def new_counts(self) -> dict[Any, int]:
        """Return the counters of one block call."""
        return self._verdicts.new_counts()

    def decide(self, operator: Operator, address: str, counts: dict[Any, int], out: Any) -> Decision:
        """Decide, and record the decision."""
        decision = self._verdicts.decide(operator, address, counts, out)
        self.rows.append(
            Traced(
                module=address,
                op=operator.name,
                nth=self._seen[address, operator.name],
                decision=decision,
                rule=self._verdicts.latest,
                never=None
                if self._reissue and operator.reissued
                else operator.forbids((), {}, next(tensors(out), None)),
                targets=self._verdicts.targets_of(operator, address, counts),
                num_bytes=sum(map(num_bytes, tensors(out))),
            )
        )
        self._seen[address, operator.name] += 1
        return decision


def log_once(rows: Iterable[Traced], rules: tuple[Any, ...], logged: set[tuple[str, str]]) -> None:
    """Log each operator and decision that is not in `logged` yet, with the rule, at level DEBUG."""
    if not _logger.isEnabledFor(logging.DEBUG):
        return
    for row in rows:
        if (row.op, row.decision) not in logged:
            logged.add((row.op, row.decision))
            never = f"; never replayed ({row.never})" if row.never else ""
            where = row.module or "the block"
            _logger.debug("%s: %s by %r, first in %s%s", row.op, row.decision, rules[row.rule], where, never)


def subsumed(rows: Iterable[Traced]) -> dict[int, tuple[int, ...]]:
    """Find targets that could be dropped without changing any decision: rule -> the rules that decide in its place.

    Judged by what each target covered when the blocks ran, not by names. Of two that cover the same, the later goes.
    """
    rows = list(rows)
    decided = {row.rule: row.decision for row in rows}
    targets = {rule for row in rows for rule in row.targets}
    found: dict[int, set[int]] = {}
    for rule in sorted(targets, reverse=True):
        instead = [_instead(rule, row, decided, targets, found) for row in rows if rule in row.targets]
        if None not in instead:
            found[rule] = {other for other in instead if other is not None}
    # One that decides in place of another may be dropped itself, and a third then decides for both.
    return {
        rule: tuple(sorted(set[int]().union(*(found.get(other, {other}) for other in others))))
        for rule, others in sorted(found.items())
    }


def _instead(
    rule: int, row: Traced, decided: dict[int, Decision], targets: set[int], found: dict[int, set[int]]
) -> int | None:
    """Return the target's rule that decides a row the same way if this one is dropped; None if none is known to."""
    if row.rule != rule:
        return row.rule if row.rule in row.targets else None
    later = next((other for other in sorted(row.targets) if other > rule and other not in found), None)
    # A rule between the two that names no target might decide differently.
    if later is None or not targets.issuperset(range(rule, later)) or decided.get(later) != row.decision:
        return None
    return later
