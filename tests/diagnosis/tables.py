"""The tables of docs/doctor.md, written from the data."""

from actmem.diagnosis import CAUSES
from actmem.diagnosis.examination import CHECKS, STEPS


def causes_table() -> str:
    """List what `explain` knows of others' messages, and of replays."""
    rows = [f"| `{c.name}` | {_cell(c.what)} | {_cell(c.fix)} |" for c in CAUSES if not c.name.startswith("actmem-")]
    return "\n".join(["| name | cause | fix |", "| --- | --- | --- |", *rows])


def checks_table() -> str:
    """List what `doctor` looks for."""
    rows = []
    for name, check in (CHECKS | STEPS).items():
        what = (check.__doc__ or "").strip().removeprefix("Look for ")
        rows.append(f"| `{name}` | {what[0].upper() + what[1:]} | {'an example' if name in STEPS else 'nothing'} |")
    return "\n".join(["| check | what it looks for | needs |", "| --- | --- | --- |", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
