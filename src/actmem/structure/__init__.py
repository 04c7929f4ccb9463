"""Read an unmodified model: its repeating blocks, the roles of the modules in a block, its fingerprint.

Nothing here changes a model, runs it, or knows about decisions, plans or tapes.

- `blocks.py` chooses the blocks, or takes the user's glob for them.
- `stacks.py` lists the places where a model repeats a module; `blocks.py` chooses among them.
- `targets.py` names what the modules inside a block are for (`norm`, `attention`, `mlp`, ...).
- `identity.py` tells two models, or two blocks, apart, whatever wrapper is round them.
"""

from actmem.structure.blocks import Block, find_blocks
from actmem.structure.identity import fingerprint, plain_path
from actmem.structure.targets import ROLES, roles

__all__ = ["ROLES", "Block", "find_blocks", "fingerprint", "plain_path", "roles"]
