"""`apply` for the other systems: repeating a call does nothing, and a call for other layers adds to earlier ones.

Those systems wrap layers one by one, so calls add up. Here a model has one plan. A further call therefore removes what
compat applied before, and applies one plan that covers both. A handle that was returned earlier stays valid: it refers
to the current plan. What `actmem.apply` itself applied is not touched: that is refused, as `actmem.apply` does.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from actmem.applying import Applied, Collectives, applied_runner, apply
from actmem.decision_rules import Rule, Slices
from actmem.decisions import Decision
from actmem.errors import ApplyError
from actmem.modes import Full, Rules, SaveEverything, Selective, Targets
from actmem.structure import Block, find_blocks
from actmem.torchcompat import named_modules

__all__ = ["RuleMode", "apply_once"]

RuleMode = SaveEverything | Full | Selective | Targets | Rules
"""The modes that other systems have a name for. Each is a list of rules."""


@dataclass(frozen=True)
class _Call:
    """What one call requested, and for which blocks. Holds no module, so a dropped model is freed at once."""

    mode: RuleMode
    root: weakref.ref[nn.Module]
    blocks: tuple[weakref.ref[nn.Module], ...]
    collectives: Collectives

    @property
    def modules(self) -> list[nn.Module]:
        return [module for ref in self.blocks if (module := ref()) is not None]

    def same(self, other: _Call) -> bool:
        asked = repr(self.mode), self.collectives, list(map(id, self.modules))
        return asked == (repr(other.mode), other.collectives, list(map(id, other.modules)))


@dataclass
class _Record:
    """The calls that one plan covers."""

    calls: tuple[_Call, ...]
    applied: Applied
    """The handle without its blocks, for the same reason."""
    handles: weakref.WeakSet[Applied] = field(default_factory=weakref.WeakSet[Applied])
    """Handles that were returned to callers and are still alive."""


_RECORDS: weakref.WeakKeyDictionary[nn.Module, _Record] = weakref.WeakKeyDictionary()


def apply_once(
    model: nn.Module, mode: RuleMode, *, blocks: str | None = None, collectives: Collectives = "save"
) -> Applied:
    """Apply a mode to a model, in addition to what compat applied to other blocks of it before.

    Repeating a call returns a handle of the first. A later call may recompute more of a block that was named before.

    Raises:
        ApplyError: `actmem.apply` was called on this model, or two calls contradict each other.
    """
    found = find_blocks(model, blocks)
    call = _Call(mode, weakref.ref(model), tuple(weakref.ref(block.module) for block in found), collectives)
    earlier = list({id(r): r for m in model.modules() if applied_runner(m) and (r := _RECORDS.get(m))}.values())
    if (known := next((r for r in earlier if any(map(call.same, r.calls))), None)) is not None:
        return _handle(known)
    calls = [*(one for record in earlier for one in record.calls), call]
    root = _common_root(calls)
    if not earlier or root is None or not _agree(calls):
        return _keep(
            apply(model, mode, blocks=blocks, collectives=collectives), (call,)
        )  # raises if a plan is applied already
    for record in earlier:
        _handle(record).remove()
    try:
        applied = _apply(root, calls)
    except Exception:
        for record in earlier:
            _renew(record.handles, _apply(_common_root(record.calls) or model, record.calls))
        raise
    _renew((handle for record in earlier for handle in record.handles), applied)
    return applied


def _apply(root: nn.Module, calls: Sequence[_Call]) -> Applied:
    """Apply one plan that covers all calls."""
    path_of = {id(module): path for path, module in named_modules(root)}
    named = {id(module) for call in calls for module in call.modules}
    paths = [path or "." for key, path in path_of.items() if key in named]
    mode = calls[0].mode if len(calls) == 1 else _joined(calls, path_of)
    return _keep(apply(root, mode, blocks=",".join(paths), collectives=calls[0].collectives), tuple(calls))


def _joined(calls: Sequence[_Call], path_of: dict[int, str]) -> Rules:
    """Return the rules of all calls, each for its own blocks; what no call names is saved."""
    named = {id(module) for call in calls for module in call.modules}
    index_of = {key: index for index, key in enumerate(key for key in path_of if key in named)}
    rules: list[Rule] = []
    defaults: list[Rule] = []
    for call in calls:
        indices, prefix = [index_of[id(module)] for module in call.modules], path_of[id(call.root())]
        *body, default = (_moved(rule, indices, len(index_of), prefix) for rule in call.mode.rules())
        rules += body
        defaults += [default] * (default.decision is not Decision.SAVE)
    ends = [rule for rule in defaults if rule.is_default] or [*defaults, Rule("save")]
    return Rules(list(dict.fromkeys([*rules, *ends])))


def _moved(rule: Rule, indices: Sequence[int], num_blocks: int, prefix: str) -> Rule:
    """Translate a rule of one call to the common plan, with the layer indices and module paths used there."""
    chosen = [
        index
        for place, index in enumerate(indices)
        if rule.layers is None or Slices.parse(rule.layers).contains(place, len(indices))
    ]
    layers = None if len(chosen) == num_blocks else ",".join(map(str, chosen))
    module = rule.module
    if module is not None and prefix and not module.startswith("*"):
        module = f"{prefix}.{module}"
    return replace(rule, layers=layers, module=module)


def _agree(calls: Sequence[_Call]) -> bool:
    """Return whether calls fit in one plan: calls that share a block may only add to what is recomputed there."""
    rules = [rule for call in calls for rule in call.mode.rules()]
    if any(r.decision is Decision.OFFLOAD for r in rules):
        return False  # it has a store of its own
    if len({call.collectives for call in calls}) > 1:
        return False
    modules = [id(module) for call in calls for module in call.modules]
    shared = {key for key in modules if modules.count(key) > 1}
    sharing = [call for call in calls if shared.intersection(map(id, call.modules))]
    return all(rule.decision is Decision.RECOMPUTE for call in sharing for rule in call.mode.rules()[:-1])


def _common_root(calls: Sequence[_Call]) -> nn.Module | None:
    """Return the module, among those named, that contains the blocks of all calls."""
    wanted = {id(module) for call in calls for module in (*call.modules, call.root())}
    roots = [root for call in reversed(calls) if (root := call.root()) is not None]
    return next((root for root in roots if wanted <= {id(module) for module in root.modules()}), None)


def _keep(applied: Applied, calls: tuple[_Call, ...]) -> Applied:
    """Record what was applied, for the next call."""
    record = _Record(calls, _with_blocks(applied, ()))
    record.handles.add(applied)
    for call in calls:
        for module in call.modules:
            _RECORDS[module] = record
    return applied


def _handle(record: _Record) -> Applied:
    """Return a handle of an applied plan."""
    root = _common_root(record.calls)
    if root is None:
        raise ApplyError("the model that this plan was applied to is gone. Build it again.")
    paths = ",".join(path or "." for path in record.applied.plan.blocks)
    handle = _with_blocks(record.applied, find_blocks(root, paths))
    record.handles.add(handle)
    return handle


def _renew(handles: Iterable[Applied], applied: Applied) -> None:
    """Make the handles of earlier calls refer to the current plan."""
    for handle in list(handles):
        vars(handle).update(vars(applied))
        for record in {id(r): r for r in map(_RECORDS.get, (b.module for b in _blocks(applied))) if r}.values():
            record.handles.add(handle)


def _blocks(applied: Applied) -> tuple[Block, ...]:
    return applied._blocks  # pyright: ignore[reportPrivateUsage]


def _with_blocks(applied: Applied, blocks: tuple[Block, ...]) -> Applied:
    """Copy a handle."""
    again = copy.copy(applied)
    again._blocks = blocks  # pyright: ignore[reportPrivateUsage]
    return again
