"""The eager engine: record what ran, keep what the plan keeps, replay the rest.

What lives here: the tape and what it needs. What must not: anything that reads a model's structure, chooses a mode,
or prints.

- `tape.py` records; `values.py` is what it records, `operators.py` what it knows of each operator.
- `verdicts.py` decides for each operator by the rules of a plan.
- `holdings.py`, `barriers.py`, `coverage.py`, `overwrites.py` and `away.py` settle what is held, copied or offloaded.
- `replay.py` runs recorded operators again, when a value is first needed.
- `known_programs.py` learns what a block runs, `follower.py` compares later calls with it instead of recording them,
  and `prepared_replay.py` replays those.
- `observation.py` notes what ran, for reports, and finds the least that must be held.
- `compiled_regions.py` has the graphs of compiled functions recorded as one operator each.
- `eager_checkpoint.py` and `second_forward.py` are torch's own checkpoint under the same plan; `torch.compile` uses it.
- `whole_calls.py` records functions as one operator; `pure_functions.py` has `replayable`.
- `unseen_functions.py` finds the autograd Functions that launch unseen kernels; `kernel_libraries.py` is the table of
  known ones, and `kernel_launches.py` sees Triton's launches.
"""

from actmem.engine.away import Away
from actmem.engine.barriers import ACROSS, all_debts, owes, settle
from actmem.engine.compiled_regions import record_compiled_regions
from actmem.engine.eager_checkpoint import BlockFamily, Compilation, KeptValues, run_checkpointed
from actmem.engine.follower import Rehearsal
from actmem.engine.holding_rules import (
    HOLD,
    RESERVE,
    UNLIMITED,
    inherited,
    is_piece,
    kept_by,
    made,
    needs_private_copy,
    number_held,
    offered,
    on_meeting,
    preserve,
    promote,
    reason,
    replay_order,
    written_in_place,
)
from actmem.engine.holdings import storage_of
from actmem.engine.module_pieces import ModulePieces
from actmem.engine.observation import Cut, Observation, ObservedOperator, Places, UnseenFunctions, smallest_cut
from actmem.engine.operators import DESCRIBED, REASONS, WHOLE_CALLS, Operator, describe
from actmem.engine.pure_functions import replayable
from actmem.engine.replay import asked_by_function, replaying, unpack
from actmem.engine.tape import Tape
from actmem.engine.unseen_functions import IMPORTED, declare_libraries, learn, running_function
from actmem.engine.values import (
    KEPT,
    Flattened,
    Handle,
    Node,
    Value,
    checksum,
    geometry,
    has_bytes,
    put_together,
    see,
    storages_of,
    take_apart,
    tensors,
    without_bits,
)
from actmem.engine.verdicts import Traced, Tracer, Verdicts, log_once, resolve, subsumed
from actmem.engine.whole_calls import recording

__all__ = [
    "ACROSS",
    "DESCRIBED",
    "HOLD",
    "IMPORTED",
    "KEPT",
    "REASONS",
    "RESERVE",
    "UNLIMITED",
    "WHOLE_CALLS",
    "Away",
    "BlockFamily",
    "Compilation",
    "Cut",
    "Flattened",
    "Handle",
    "KeptValues",
    "ModulePieces",
    "Node",
    "Observation",
    "ObservedOperator",
    "Operator",
    "Places",
    "Rehearsal",
    "Tape",
    "Traced",
    "Tracer",
    "UnseenFunctions",
    "Value",
    "Verdicts",
    "all_debts",
    "asked_by_function",
    "checksum",
    "declare_libraries",
    "describe",
    "geometry",
    "has_bytes",
    "inherited",
    "is_piece",
    "kept_by",
    "learn",
    "log_once",
    "made",
    "needs_private_copy",
    "number_held",
    "offered",
    "on_meeting",
    "owes",
    "preserve",
    "promote",
    "put_together",
    "reason",
    "record_compiled_regions",
    "recording",
    "replay_order",
    "replayable",
    "replaying",
    "resolve",
    "run_checkpointed",
    "running_function",
    "see",
    "settle",
    "smallest_cut",
    "storage_of",
    "storages_of",
    "subsumed",
    "take_apart",
    "tensors",
    "unpack",
    "without_bits",
    "written_in_place",
]
