"""All hazards, in the order of the table."""

from tests.hazards import effects, libraries, routing_and_precision, running_twice, saved_values
from tests.hazards.comparing import Hazard

_ALL: tuple[Hazard, ...] = (
    *running_twice.HAZARDS,
    *effects.HAZARDS,
    *saved_values.HAZARDS,
    *libraries.HAZARDS,
    *routing_and_precision.HAZARDS,
)

HAZARDS: dict[str, Hazard] = {h.name: h for h in sorted(_ALL, key=lambda h: h.need)}
assert len(HAZARDS) == len(_ALL), "two hazards have one name"
