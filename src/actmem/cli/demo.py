"""`actmem demo`: the demonstration, for readers or as data."""

from __future__ import annotations

from actmem import demo
from actmem.cli.commands import Demo
from actmem.cli.failing import ANSWER_IS_NO
from actmem.cli.schema import DemoRow, DemoShown
from actmem.cli.screen import Screen

__all__ = ["for_readers", "run"]


def for_readers() -> int:
    """Print the demonstration."""
    return demo.main()


def run(_: Demo, screen: Screen) -> tuple[DemoShown, int]:
    """Train the small model, and return the figures alone."""
    with screen.progress("training under three modes"):
        rows = demo.compare(demo.Size())
    with screen.progress("keeping a budget"):
        kept = demo.keep_budget(demo.Size(batch=8))
    assert kept.plan.predicted is not None
    equal = all(row.gradients_equal and row.loss_equal for row in rows)
    works = all(row.num_replayed_ops and row.peak_bytes < rows[0].peak_bytes for row in rows[1:])
    ok = equal and works and kept.equal and kept.measured_bytes <= kept.budget_bytes
    shown = DemoShown(
        ok=ok,
        rows=tuple(
            DemoRow(
                name=row.name,
                peak_bytes=row.peak_bytes,
                saved_bytes=row.saved_bytes,
                replayed_flops=row.replayed_flops,
                num_replayed=row.num_replayed_ops,
                time_ratio=row.time_ratio,
                gradients_equal=row.gradients_equal,
                loss_equal=row.loss_equal,
            )
            for row in rows
        ),
        budget_bytes=kept.budget_bytes,
        predicted_bytes=kept.plan.predicted.peak_bytes,
        measured_bytes=kept.measured_bytes,
        budget_equal=kept.equal,
    )
    return shown, 0 if ok else ANSWER_IS_NO
