"""Show a plan to a person: one offline page with all its numbers, and a memory timeline for trace viewers.

What a page shows is plain data (`data.py`), built from a profile and a plan (`building.py`) and then written
(`writing.py`). Nothing here decides anything, and nothing reads a model.
"""

from actmem.page.building import build
from actmem.page.data import PageData
from actmem.page.timeline import timeline, write_timeline
from actmem.page.writing import check_installed, write_page

__all__ = ["PageData", "build", "check_installed", "timeline", "write_page", "write_timeline"]
