"""Say what was done, from plain data.

What lives here: turning observations into tables. What must not: anything that looks at a model or changes one.
"""

from actmem.report.compiled import CompiledGraph, compiled_graphs
from actmem.report.summary import KindReport, Report, ReportRow, summarise
from actmem.report.text import paths_of, render
from actmem.report.trace import BlockTrace, Trace, gather

__all__ = [
    "BlockTrace",
    "CompiledGraph",
    "KindReport",
    "Report",
    "ReportRow",
    "Trace",
    "compiled_graphs",
    "gather",
    "paths_of",
    "render",
    "summarise",
]
