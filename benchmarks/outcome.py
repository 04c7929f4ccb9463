"""What a benchmark found, and the bounds it must keep: plain data, written to `benchmarks/results/`."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Bound:
    """A promise: `value` is at most `limit`."""

    name: str
    value: float
    limit: float
    exact: bool = True
    """Bytes and counts are; time is not."""
    aim: float | None = None
    """What `limit` is to become, where that is not reached yet."""

    @property
    def kept(self) -> bool:
        """Whether the promise holds."""
        return self.value <= self.limit


@dataclass
class Outcome:
    """All figures of one benchmark."""

    name: str
    settings: dict[str, Any]
    exact: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per variant: bytes, FLOPs and counts. They repeat on every machine with the same torch."""
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per variant: seconds and ratios of seconds."""
    bounds: list[Bound] = field(default_factory=list)

    def write(self, folder: Path = RESULTS) -> Path:
        """Write `<name>.json` into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        content = {
            "name": self.name,
            "environment": environment(),
            "settings": self.settings,
            "exact": self.exact,
            "measured": self.measured,
            "bounds": [_plain(b) for b in self.bounds],
        }
        path.write_text(json.dumps(content, indent=2) + "\n")
        return path

    def print(self, console: Console) -> None:
        """Show every variant and every bound."""
        for title, variants in (("exact", self.exact), ("measured", self.measured)):
            for group in alike(variants):
                console.print(_table(f"{self.name}, {title}", group))
        table = Table(title=f"{self.name}, bounds")
        headings, *rows = promises([_plain(b) for b in self.bounds])
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "promise" else "right")
        for row in rows:
            table.add_row(*row[:-1], "yes" if row[-1] == "yes" else "[red]NO")
        console.print(table)


def promises(bounds: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of a table of bounds, headings first; with the aims, if there are any."""
    aimed = any("aim" in b for b in bounds)
    found = [["promise", "value", "at most", *(["aim"] if aimed else []), "kept"]]
    for b in bounds:
        aim = [shown("", b["aim"]) if "aim" in b else ""] if aimed else []
        found.append([b["name"], shown("", b["value"]), shown("", b["limit"]), *aim, "yes" if b["kept"] else "no"])
    return found


def _plain(bound: Bound) -> dict[str, Any]:
    return {name: value for name, value in {**vars(bound), "kept": bound.kept}.items() if value is not None}


def environment() -> dict[str, Any]:
    """Describe the machine and the versions that produced a result."""
    try:
        own = version("actmem")
    except PackageNotFoundError:  # run from the source tree
        own = "source tree"
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "actmem": own,
    }


def shown(key: str, value: Any) -> str:
    """Format a figure in the unit that its name states."""
    if key.endswith("_bytes"):
        return f"{value / 2**20:.2f} MiB"
    if key.endswith("_flops"):
        return f"{value / 1e9:.3f} GFLOP"
    if key.endswith("_seconds"):
        return f"{value * 1e3:.2f} ms"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def alike(variants: dict[str, dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Group variants that have the same kinds of figures, so that no table has holes."""
    groups: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for name, figures in variants.items():
        groups.setdefault(tuple(figures), {})[name] = figures
    return list(groups.values())


def _table(title: str, variants: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=title)
    table.add_column("variant")
    keys = list(next(iter(variants.values())))
    for key in keys:
        table.add_column(key.removesuffix("_bytes").removesuffix("_seconds").replace("_", " "), justify="right")
    for name, figures in variants.items():
        table.add_row(name, *(shown(k, figures[k]) for k in keys))
    return table
