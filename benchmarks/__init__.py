"""What actmem costs and saves, next to plain training and torch's own checkpointing: `python -m benchmarks.run`.

Each benchmark is one file with `run(...) -> Outcome`. Sizes are arguments, so that the tests can run small versions.
"""
