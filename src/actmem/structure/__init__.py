"""Read an unmodified model: its repeating blocks, the roles of the modules in a block, its fingerprint.

Nothing here changes a model, runs it, or knows about decisions or tapes.

- `blocks.py` chooses the blocks, or takes the user's glob for them.
- `stacks.py` lists the places where a model repeats a module; `blocks.py` chooses among them.
- `towers.py` tells the language model from vision and audio towers.
- `targets.py` names what the modules inside a block are for (`norm`, `attention`, `mlp`, ...).
- `declared.py` reads what a model says of that itself, in its attribute `actmem_targets`.
- `layer_types.py` tells sliding from full from linear attention.
- `condition.py` tells whether a model is still as it was when it was planned for.
- `identity.py` tells two models, or two blocks, apart, whatever wrapper is round them.
"""

from actmem.structure.blocks import Block, check_module, find_blocks
from actmem.structure.condition import Condition, condition, condition_digest, difference
from actmem.structure.heads import find_head
from actmem.structure.identity import fingerprint, plain_path
from actmem.structure.layer_types import layer_type
from actmem.structure.targets import ROLES, find_roles, roles

__all__ = [
    "ROLES",
    "Block",
    "Condition",
    "check_module",
    "condition",
    "condition_digest",
    "difference",
    "find_blocks",
    "find_head",
    "find_roles",
    "fingerprint",
    "layer_type",
    "plain_path",
    "roles",
]
