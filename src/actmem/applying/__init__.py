"""Apply a plan to a model: check it, exchange the classes of its blocks, run them under the tape.

- `application.py` has `apply`, what it refuses before anything is changed, and the handle that it returns.
- `applied_block.py` exchanges the class of a block, and runs its forward under an engine.
- `broken_blocks.py` says what became of compiled blocks that are not one graph.
- `offload_context.py` has `offload`, for code without a plan.
"""

from actmem.applying.application import Applied, Collectives, apply, device_of
from actmem.applying.applied_block import applied_runner, local
from actmem.applying.offload_context import KeptTensor, Offloading, Sent, can_move, offload, send, unpack

__all__ = [
    "Applied",
    "Collectives",
    "KeptTensor",
    "Offloading",
    "Sent",
    "applied_runner",
    "apply",
    "can_move",
    "device_of",
    "local",
    "offload",
    "send",
    "unpack",
]
