"""What `actmem record` adds to the file of a memory snapshot: the plan, its prediction, and versions.

The file is a snapshot of torch with one key more, so everything that reads snapshots reads it too.
"""

import lzma
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from actmem.errors import ModeError, SnapshotError

__all__ = ["KEY", "Attachment", "attachment_from", "write_recording"]

KEY = "actmem"


@dataclass(frozen=True)
class Attachment:
    """The plan that was in force, what it predicted, and the versions of what ran.

    >>> Attachment(versions={"actmem": "0.1"}, predicted_bytes=2**30).predicted_bytes
    1073741824
    """

    __pydantic_config__: ClassVar[dict[str, bool | str]] = {"extra": "forbid"}

    versions: dict[str, str] = field(default_factory=dict[str, str])
    """Versions of actmem, torch, Python and CUDA, and the name of the card."""
    plan: str | None = None
    """The plan file's text; None if nothing was applied."""
    predicted_bytes: int | None = None
    """The peak that was predicted for the step."""
    timeline: tuple[int, ...] = ()
    """Bytes that the prediction has alive after each operator of the step."""


def attachment_from(raw: object, name: str) -> Attachment:
    """Read an attachment, which is as little to be trusted as the snapshot that it is part of.

    Raises:
        SnapshotError: if a part of it is of another kind than `actmem record` writes.
    """
    if raw is None:
        return Attachment()
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Attachment).validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise SnapshotError(
            f"{name!r} has a part {KEY!r} that this version of actmem did not write ({where}: {first['msg']}). A newer "
            "version may have written it: install that one."
        ) from None


def write_recording(path: str | Path, snapshot: Mapping[str, Any], attachment: Attachment) -> None:
    """Write a snapshot as torch makes it, with an attachment, as an .xz file.

    Args:
        path: The file, such as step.pickle.xz.
        snapshot: What torch.cuda.memory._snapshot() returns.
        attachment: What is added to it.

    Raises:
        ModeError: if the file cannot be written.
    """
    data = pickle.dumps({**snapshot, KEY: asdict(attachment)}, protocol=4)
    try:
        Path(path).write_bytes(lzma.compress(data, preset=6))
    except OSError as error:
        raise ModeError(
            f"cannot write the recording {str(path)!r}: {error.strerror}. Name a file in a folder that exists."
        ) from error
