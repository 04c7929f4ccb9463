"""Say what was done, from plain data.

What lives here: turning observations into tables. What must not: anything that looks at a model or changes one.
"""

from actmem.report.summary import KindReport, Report, ReportRow, summarise
from actmem.report.text import render

__all__ = ["KindReport", "Report", "ReportRow", "render", "summarise"]
