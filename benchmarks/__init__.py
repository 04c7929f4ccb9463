"""What actmem costs and frees, beside plain training and torch's own checkpointing: `python -m benchmarks.run`.

Each benchmark is one file with `run(...) -> Outcome`. Sizes are arguments, so that the tests can run it in small.
"""
