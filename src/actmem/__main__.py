"""Run the command line: `python -m actmem`."""

import sys

from actmem.cli import main

if __name__ == "__main__":
    sys.exit(main())
