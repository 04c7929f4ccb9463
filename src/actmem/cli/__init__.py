"""The command line `actmem`.

- `commands.py` declares commands and options, and the text of `--help`; `schema.py` declares the `--json` output.
- `runner.py` parses, runs and prints; `failures.py` has the error messages and the exit codes.
- `loaded_model.py` turns a model's name into a model and a batch; `mode_names.py` parses modes.
- Each command has a file with `run`, which returns data, and `show`, which prints that data for people.

Nothing here decides or measures anything: the command line calls the library, and the library never calls it.
"""

from actmem.cli.runner import main

__all__ = ["main"]
