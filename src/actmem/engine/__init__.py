"""The eager engine: record what ran, keep what the plan keeps, replay the rest.

What lives here: the tape and what it needs. What must not: anything that reads a model's structure, chooses a mode,
or prints.
"""
