"""Set what must stand before torch is imported, for the tests and the docstring examples alike."""

import os
import tempfile
from pathlib import Path

# Some virtual machines announce AMX and then fault on it in bfloat16 products.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Inductor's cache on disk does not tell instruction sets apart: a kernel of another one computes wrong numbers.
if "ATEN_CPU_CAPABILITY" in os.environ:
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{os.environ['ATEN_CPU_CAPABILITY']}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
