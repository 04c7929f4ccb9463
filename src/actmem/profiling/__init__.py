"""Finding out what a step does: run once, on fake tensors or for real, with nothing held."""

from actmem.profiling.stepping import profile

__all__ = ["profile"]
