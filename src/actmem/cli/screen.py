"""Where output goes: results to stdout, progress and notes to stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from typing_extensions import override

__all__ = ["Screen", "field", "flops_text", "ratio_text", "seconds_text", "table"]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to `main` what it means that nobody reads any more."""
        raise BrokenPipeError


class _Table(Table):
    @override
    def add_row(self, *cells: Any, **options: Any) -> None:
        """Take texts as they are: a name of a module or a folder may have brackets, which rich takes for markup."""
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **options)


class Screen:
    """The two streams of a command."""

    def __init__(self) -> None:
        # They are looked up now, not at import: tests and wrappers exchange them.
        self.out = _Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())
        self.notes = _Console(file=sys.stderr, highlight=False, soft_wrap=not sys.stderr.isatty())

    def note(self, text: str) -> None:
        """Say something beside the result."""
        self.notes.print(text, markup=False)

    def copied(self, before: str, line: str) -> None:
        """Print a line that is to be copied: it is never divided, however narrow the terminal is."""
        self.out.print(f"{before}{line}", markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def progress(self, what: str) -> Generator[Callable[[int, int | None], None]]:
        """Show a spinner, and a bar once something is known of how far it is; on a terminal only.

        Yields:
            A function that is told how many are done, of how many.
        """
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=self.notes, transient=True, disable=not self.notes.is_terminal) as shown:
            task = shown.add_task(what, total=None)

            def told(done: int, total: int | None) -> None:
                shown.update(task, completed=done, total=total)

            yield told


def table(title: str, *columns: str, num_texts: int = 1) -> Table:
    """Begin a table whose first columns are texts, and the others numbers."""
    made = _Table(title=Text(title, style="bold"), title_justify="left", box=SIMPLE_HEAD)
    for nth, column in enumerate(columns):
        text = nth < num_texts
        options: dict[str, Any] = {"min_width": 9} if text else {"min_width": 7, "justify": "right"}
        made.add_column(Text(column), overflow="fold", **options)
    return made


def ratio_text(ratio: float) -> str:
    """Write a step time ratio.

    >>> ratio_text(1.1303)
    '1.130x'
    """
    return f"{ratio:.3f}x"


def flops_text(flops: int) -> str:
    """Write a number of FLOPs for a reader.

    >>> flops_text(0), flops_text(2_500_000), flops_text(83_562_900_000_000)
    ('0', '2.5 MFLOP', '83.6 TFLOP')
    """
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if flops >= scale:
            return f"{flops / scale:.1f} {unit}"
    return str(flops)


def seconds_text(seconds: float) -> str:
    """Write a time for a reader.

    >>> seconds_text(0.0000123), seconds_text(0.5), seconds_text(12)
    ('12.3 us', '500.0 ms', '12.00 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def field(name: str, text: str) -> Table:
    """Write a name beside a text that may be longer than a line."""
    made = Table.grid(padding=(0, 2))
    made.add_column(width=9, style="dim")
    made.add_column()
    made.add_row(f"  {name}", Text(text))
    return made
