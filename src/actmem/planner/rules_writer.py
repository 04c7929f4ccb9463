"""From decisions at every call of a profile to readable plan rules that say the same."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from fnmatch import fnmatchcase

from actmem.decision_rules import Rule
from actmem.decisions import Decision
from actmem.ops import GROUPS
from actmem.profiles import Layer, Profile

__all__ = ["ANY", "loosened", "write_rules"]

ANY = None
"""The decision where nothing depends on it: a value that neither a backward step nor a replay reaches."""


def loosened(
    profile: Profile,
    keeps: Sequence[Sequence[Decision]],
    replayed: Sequence[Sequence[int]],
    held: Sequence[Sequence[int]],
) -> list[list[Decision | None]]:
    """Put `ANY` at every call that neither ran again nor made something that was held, whenever its block ran."""
    matters: dict[tuple[str, int], set[int]] = {}
    for layer, again, kept in zip(profile.layers, replayed, held, strict=True):
        its = matters.setdefault((layer.path, len(layer.calls)), set())
        its.update(again, (layer.values[v].call for v in kept))
    return [
        [k if c in matters[layer.path, len(layer.calls)] else ANY for c, k in enumerate(keep)]
        for layer, keep in zip(profile.layers, keeps, strict=True)
    ]


def write_rules(profile: Profile, keeps: Sequence[Sequence[Decision | None]]) -> tuple[Rule, ...]:
    """Return rules that decide as `keeps` does.

    Args:
        profile: the profile.
        keeps: for each layer, the decision or `ANY` for each of its calls. Those of a block that is called more than
            once are the same each time.
    """
    groups: dict[tuple[int, tuple[Decision | None, ...]], list[int]] = {}
    order = {path: i for i, path in enumerate(profile.blocks)}
    seen: set[str] = set()
    for layer, keep in zip(profile.layers, keeps, strict=True):
        if layer.path not in seen:  # a block that is called again is decided already
            seen.add(layer.path)
            groups.setdefault((layer.kind, tuple(keep)), []).append(order[layer.path])
    by_kind = {layer.kind: layer for layer in profile.layers}
    rules: list[Rule] = []
    whole = {i for (_, keep), found in groups.items() if set(keep) <= {Decision.SAVE, ANY} for i in found}
    nothing = {i for (_, keep), found in groups.items() if set(keep) <= {Decision.RECOMPUTE, ANY} for i in found}
    mixed = {key: found for key, found in groups.items() if not set(found) <= {*whole, *nothing}}
    for (kind, keep), found in mixed.items():
        where = None if len(mixed) == 1 and not whole and not nothing else slices(found)
        listed = _listed(by_kind[kind], keep, where)
        rules += listed[:-1] if where is None else listed
    if not mixed:
        if not nothing:
            return (Rule("save"),)
        return (Rule("recompute"),) if not whole else (Rule("save", layers=slices(sorted(whole))), Rule("recompute"))
    if whole and (nothing or len(whole) < len(profile.blocks)):
        rules.insert(0, Rule("save", layers=slices(sorted(whole))))
    if whole or nothing or len(mixed) > 1:
        return (*rules, Rule("recompute"))
    (kind, keep), _ = next(iter(mixed.items()))
    return (*rules, _listed(by_kind[kind], keep, None)[-1])


def _listed(layer: Layer, keep: Sequence[Decision | None], where: str | None) -> list[Rule]:
    """Write the rules of one group of equal layers: that all is offloaded, what is kept, or what is not.

    Of the last two, the shorter.
    """
    if set(keep) <= {Decision.OFFLOAD, ANY}:
        return [Rule(Decision.OFFLOAD, layers=where)]
    listed = [
        [*_layer_rules(layer, [k or default for k in keep], where, default), Rule(default, layers=where)]
        for default in (Decision.RECOMPUTE, Decision.SAVE)
    ]
    return min(listed, key=len)


def _layer_rules(layer: Layer, keep: Sequence[Decision], where: str | None, default: Decision) -> list[Rule]:
    """Write a rule for everything that differs from the default decision, the most specific modules first."""
    rules: list[Rule] = []
    decided: set[int] = set()
    wanted = [i for i, k in enumerate(keep) if k is not default and layer.calls[i].makes]
    places = {(layer.calls[i].module, _selector(layer.calls[i].op)) for i in wanted}
    for module, op in sorted(places, key=lambda p: (-len(p[0].split(".")) if p[0] else 1, p)):
        matched = _matched(layer, module)
        under = [
            i
            for i, call in enumerate(layer.calls)
            if i not in decided and _selector(call.op) == op and any(_is_under(call.module, m) for m in matched)
        ]
        for decision in {keep[i]: None for i in wanted if i in under}:
            chosen = [i for i in under if keep[i] is decision and layer.calls[i].module == module]
            if not chosen:
                continue
            left = [i for i in under if i not in decided]
            free = [i for i in left if keep[i] is not decision]
            nth = None if not free and chosen == left else ",".join(str(left.index(i)) for i in chosen)
            rules.append(Rule(decision, layers=where, module=_glob(layer, module) if module else None, op=op, nth=nth))
            decided |= set(chosen)
    return rules


def _matched(layer: Layer, module: str) -> list[str]:
    """List the modules of the block that a rule's glob matches: it may also match the end of another path."""
    if not module:
        return [""]
    pattern = _glob(layer, module)
    return [m for m in layer.modules if m and fnmatchcase(f"{layer.path}.{m}".strip("."), pattern)]


def _glob(layer: Layer, module: str) -> str:
    """Write a module of a block as a glob over full paths. Where the model itself is the block, nothing precedes it."""
    return f"*.{glob.escape(module)}" if layer.path else glob.escape(module)


def _selector(op: str) -> str:
    """Name an operator so that the rule holds on other devices too."""
    packet = op.rsplit(".", 1)[0]
    return "attention" if packet in GROUPS["attention"] else packet


def _is_under(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(module + ".")


def slices(indices: Sequence[int]) -> str:
    """Write a set of indices as slice text.

    >>> slices([0, 1, 2, 5, 7, 8])
    '0:3,5,7:9'
    """
    parts: list[list[int]] = []
    for i in sorted(set(indices)):
        if parts and parts[-1][1] == i:
            parts[-1][1] = i + 1
        else:
            parts.append([i, i + 1])
    return ",".join(str(a) if b == a + 1 else f"{a}:{b}" for a, b in parts)
