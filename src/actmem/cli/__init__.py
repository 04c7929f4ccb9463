"""The command line `actmem`.

- `commands.py` is what can be typed, and the text of `--help`; `schema.py` is what is printed with `--json`.
- `running.py` goes from one to the other; `failing.py` has the messages and the exit codes.
- `loading.py` and `naming.py` read what a model and a mode are called.
- One file for each command has `run`, which returns data, and `show`, which prints it for readers.

Nothing here decides or measures anything: it calls the library, and the library never calls it.
"""

from actmem.cli.running import main

__all__ = ["main"]
