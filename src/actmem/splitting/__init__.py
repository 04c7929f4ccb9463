"""Splitting what no decision about blocks can lower: the head's logits and the loss, and wide parts of the blocks.

- `deferred_logits.py` is the head's output that is not there yet; `row_rules.py` says what torch's functions do to it.
- `row_chunks.py` computes values and gradients of its rows, chunk by chunk; `class_shards.py` helps it with heads whose
  classes are divided over ranks.
- `weight_versions.py` notices that the head's weights have been written meanwhile.
- `token_parts.py` runs parts of a block on pieces of tokens; `token_check.py` checks that it may.
- `split_model.py` puts both on a model, and takes them off again.
"""

from actmem.splitting import row_rules as _registered  # noqa: F401 # pyright: ignore[reportUnusedImport] # fills RULES
from actmem.splitting.deferred_logits import Deferral, DeferredLogits
from actmem.splitting.head_split import SplitHead
from actmem.splitting.split_model import SplitModel, carry_split, split_for_now
from actmem.splitting.token_parts import SplitPart

__all__ = ["Deferral", "DeferredLogits", "SplitHead", "SplitModel", "SplitPart", "carry_split", "split_for_now"]
