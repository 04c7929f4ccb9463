"""Set what must stand before torch is imported, for the tests and the docstring examples alike."""

import os

# Some virtual machines announce AMX and then fault on it in bfloat16 products.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
