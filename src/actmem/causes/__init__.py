"""Known error messages of recomputation and offloading: what caused them, and what to change. Without torch.

- `cause.py` is the form: one `Cause` for each thing that can have happened.
- `recomputing.py`, `around.py` and `own.py` are the data: torch's checkpoint, what surrounds it, and actmem's errors.
- `pairs.py` reads the shapes and dtypes that a message lists.
- `explaining.py` finds the causes that fit a text, and ranks them.

Nothing here looks at a model: that is `actmem.diagnosis`.
"""

from actmem.causes.cause import Cause
from actmem.causes.explaining import CAUSES, Candidate, Explanation, explain

__all__ = ["CAUSES", "Candidate", "Cause", "Explanation", "explain"]
