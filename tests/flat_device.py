"""A device with an H100's speed where a budget is a bound on the bytes of tensors: torch's allocator does not serve it.

On a card, a budget also covers cuBLAS's workspaces and what lies outside torch: more than the small models of tests.
"""

import actmem

FLAT = actmem.device("h100-80gb").tensors_only()
