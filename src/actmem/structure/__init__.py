"""Read an unmodified model: its repeating blocks, the roles of the modules in a block, its fingerprint.

Nothing here changes a model, runs it, or knows about decisions or tapes.

- `blocks.py` lists where a model repeats a module, tells towers apart, and chooses the blocks.
- `targets.py` names what the modules inside a block are for (`norm`, `attention`, `mlp`, ...), by their names or by the
  model's own attribute `actmem_targets`, and tells sliding from full from linear attention.
- `model_condition.py` compares a model with what it was when it was planned for.
- `identity.py` tells two models, or two blocks, apart, whatever wraps them.
"""

from actmem.structure.blocks import Block, check_module, find_blocks
from actmem.structure.identity import (
    buffers_of,
    find_head,
    fingerprint,
    named_modules,
    named_parameters,
    parameters_of,
    plain_path,
)
from actmem.structure.model_condition import Condition, condition, condition_digest, difference
from actmem.structure.targets import ROLES, find_roles, layer_type, roles

__all__ = [
    "ROLES",
    "Block",
    "Condition",
    "buffers_of",
    "check_module",
    "condition",
    "condition_digest",
    "difference",
    "find_blocks",
    "find_head",
    "find_roles",
    "fingerprint",
    "layer_type",
    "named_modules",
    "named_parameters",
    "parameters_of",
    "plain_path",
    "roles",
]
