"""Write the published schemas: `python -m tests.cli.schemas`."""

import json
from pathlib import Path

from actmem.cli.runner import DOCUMENTED, document_of
from actmem.cli.schema import schema_of

PUBLISHED = Path(__file__).parents[2] / "docs" / "schema"


def main() -> None:
    """Write the schema of every command to docs/schema/."""
    for command in DOCUMENTED:
        text = json.dumps(schema_of(document_of(command)), indent=2)
        (PUBLISHED / f"{command}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
