"""Terminal output: results go to stdout, progress and notes to stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from textwrap import wrap
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from typing_extensions import override

__all__ = ["Screen", "field", "flops_text", "ratio_text", "seconds_text", "table"]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let `main` decide what a closed pipe means."""
        raise BrokenPipeError


class _Table(Table):
    """A table that never breaks names or numbers: if it is too wide, each row becomes a few lines."""

    def __init__(self, heading: str) -> None:
        super().__init__(box=SIMPLE_HEAD)
        self._heading = heading
        self._texts: list[tuple[str, ...]] = []

    @override
    def add_row(self, *cells: Any, **options: Any) -> None:
        """Take strings literally: module and folder names may contain brackets, which rich would read as markup."""
        texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        self._texts.append(tuple(str(text) for text in texts))
        super().add_row(*texts, **options)

    @override
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._heading:
            yield from _wrapped(self._heading, options.max_width, style="bold")
        for nth, column in enumerate(self.columns):
            texts = [str(column.header), *(row[nth] for row in self._texts)]
            parts = [part for text in texts for part in (text.splitlines() if column.no_wrap else text.split())]
            column.min_width = max([column.min_width or 0, *map(len, parts)])
        if sum((column.min_width or 0) + 3 for column in self.columns) < options.max_width:
            yield from super().__rich_console__(console, options)
            return
        first, *others = [" ".join(str(column.header).split()) for column in self.columns]
        yield from _wrapped(f"{first}: {', '.join(others)}", options.max_width, before="  ", style="dim")
        for name, *cells in self._texts:
            yield Text(f"  {name}")
            said = ", ".join(cell for cell in cells if cell not in ("", "-"))
            yield from _wrapped(said, options.max_width, before="      ")
        yield Text("")


def _wrapped(text: str, width: int, *, before: str = "", style: str = "") -> Iterator[Text]:
    """Wrap a text between words only. Rich does not wrap at all if the output is not a terminal."""
    lines = wrap(
        text,
        width,
        initial_indent=before,
        subsequent_indent=before,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return (Text(line, style=style) for line in lines)


class Screen:
    """The two streams of a command."""

    def __init__(self) -> None:
        # Looked up now, not at import, because tests and wrappers replace the streams.
        self.out = _Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())
        self.notes = _Console(file=sys.stderr, highlight=False, soft_wrap=not sys.stderr.isatty())

    def note(self, text: str) -> None:
        """Print a note to stderr. It may end in a path, so it is not wrapped."""
        self.notes.print(text, markup=False, soft_wrap=True)

    def paragraph(self, text: str) -> None:
        """Print a sentence, wrapped between words only."""
        for line in _wrapped(text, self.out.width):
            self.out.print(line)

    def copied(self, before: str, line: str) -> None:
        """Print a line for the reader to copy: it is never wrapped, however narrow the terminal."""
        self.out.print(f"{before}{line}", markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def progress(self, what: str) -> Generator[Callable[[int, int | None], None]]:
        """Show a spinner, and a progress bar once the total is known; on a terminal only.

        Yields:
            A function to call with the number done and the total, or None if the total is unknown.
        """
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=self.notes, transient=True, disable=not self.notes.is_terminal) as shown:
            task = shown.add_task(what, total=None)

            def told(done: int, total: int | None) -> None:
                shown.update(task, completed=done, total=total)

            yield told


def table(title: str, *columns: str, num_texts: int = 1, copied: Sequence[str] = ()) -> Table:
    """Create an empty table whose first columns hold text and whose others hold numbers.

    Args:
        title: the heading above the table.
        columns: the column headers.
        num_texts: number of text columns; their cells may wrap.
        copied: text columns that readers copy, such as device names; like numbers, they never wrap.
    """
    made = _Table(title)
    for nth, column in enumerate(columns):
        text = nth < num_texts
        options: dict[str, Any] = {"min_width": 9} if text else {"min_width": 7, "justify": "right"}
        made.add_column(Text(column), overflow="fold", no_wrap=not text or column in copied, **options)
    return made


def ratio_text(ratio: float) -> str:
    """Format a step-time ratio.

    >>> ratio_text(1.1303)
    '1.130x'
    """
    return f"{ratio:.3f}x"


def flops_text(flops: int) -> str:
    """Format a number of FLOPs.

    >>> flops_text(0), flops_text(2_500_000), flops_text(83_562_900_000_000)
    ('0', '2.5 MFLOP', '83.6 TFLOP')
    """
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if flops >= scale:
            return f"{flops / scale:.1f} {unit}"
    return str(flops)


def seconds_text(seconds: float) -> str:
    """Format a duration.

    >>> seconds_text(0.0000123), seconds_text(0.5), seconds_text(12)
    ('12.3 us', '500.0 ms', '12.00 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def field(name: str, text: str) -> Table:
    """Lay out a label and its text in two columns; the text may wrap."""
    made = Table.grid(padding=(0, 2))
    made.add_column(width=9, style="dim")
    made.add_column()
    made.add_row(f"  {name}", Text(text))
    return made
