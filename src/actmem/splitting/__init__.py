"""Splitting what no decision about blocks can lower: the head's logits and the loss, in chunks of tokens."""

from actmem.splitting import row_rules as _registered  # noqa: F401 # pyright: ignore[reportUnusedImport] # fills RULES
from actmem.splitting.deferred_logits import Deferral, DeferredLogits
from actmem.splitting.head_split import SplitHead, carry_split, split_for_now, split_head

__all__ = ["Deferral", "DeferredLogits", "SplitHead", "carry_split", "split_for_now", "split_head"]
