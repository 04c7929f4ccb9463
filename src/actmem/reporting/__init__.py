"""Show what was done, and what a plan would do: tables, traces, and one offline page.

What lives here: plain data, and text or pages made of it. What must not: anything that changes a model or decides.

- `summary.py` and `report_text.py` are the report of a run; `compiled.py`, `compiled_parts.py` and
  `trace.py` its details.
- `page_data.py` is what a page shows; `page_builder.py` fills it, with `block_view.py` and `page_frontier.py`;
  `page_writer.py` writes it.
- `job_page.py` is the page of a pipeline's stages.
- `memory_page.py` is the page of a recording of CUDA memory.
- `chrome_trace.py` writes a memory timeline for trace viewers.
"""

from typing import TYPE_CHECKING

from actmem.doors import on_first_use

if TYPE_CHECKING:
    from actmem.reporting.chrome_trace import timeline, write_timeline
    from actmem.reporting.compiled import CompiledGraph, compiled_graphs
    from actmem.reporting.compiled_parts import CompiledPart, list_compiled_parts
    from actmem.reporting.job_page import write_job_page
    from actmem.reporting.memory_page import write_memory_page
    from actmem.reporting.page_builder import build
    from actmem.reporting.page_data import PageData
    from actmem.reporting.page_writer import check_installed, write_page
    from actmem.reporting.report_text import paths_of, render
    from actmem.reporting.summary import KindReport, Report, ReportRow, summarise
    from actmem.reporting.trace import BlockTrace, Trace, gather

__all__ = [
    "BlockTrace",
    "CompiledGraph",
    "CompiledPart",
    "KindReport",
    "PageData",
    "Report",
    "ReportRow",
    "Trace",
    "build",
    "check_installed",
    "compiled_graphs",
    "gather",
    "list_compiled_parts",
    "paths_of",
    "render",
    "summarise",
    "timeline",
    "write_job_page",
    "write_memory_page",
    "write_page",
    "write_timeline",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "actmem.reporting.chrome_trace": "timeline write_timeline",
        "actmem.reporting.compiled": "CompiledGraph compiled_graphs",
        "actmem.reporting.compiled_parts": "CompiledPart list_compiled_parts",
        "actmem.reporting.job_page": "write_job_page",
        "actmem.reporting.memory_page": "write_memory_page",
        "actmem.reporting.page_builder": "build",
        "actmem.reporting.page_data": "PageData",
        "actmem.reporting.page_writer": "check_installed write_page",
        "actmem.reporting.report_text": "paths_of render",
        "actmem.reporting.summary": "KindReport Report ReportRow summarise",
        "actmem.reporting.trace": "BlockTrace Trace gather",
    },
)
