"""What a plan says of a value, and why a value is not recomputed, without torch.

Both print, compare and serialise as the words that they are. Where many values pass, members are names of the module:
Python looks up a member of an enum slowly.
"""

from enum import StrEnum

__all__ = ["Decision", "Reason"]


class Decision(StrEnum):
    """What a plan says of a value.

    >>> Decision("save"), Decision.SAVE == "save"
    ('save', True)
    """

    __repr__ = str.__repr__

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


class Reason(StrEnum):
    """Why a value is not recomputed: the plan keeps it, the smallest cut does, or it cannot be replayed.

    What each of the latter means is in `engine/operators.py`, `REASONS`.
    """

    __repr__ = str.__repr__

    SAVED = "save"
    OFFLOADED = "offload"
    CUT = "cut"

    BARRIER = "barrier"
    COLLECTIVE = "collective"
    CONSTANT = "constant"
    EXTERNAL = "external"
    GENERATOR = "generator"
    GRADIENT = "gradient"
    OPAQUE = "opaque"
    PARAMETER = "parameter"
    RECURRENT = "recurrent"
    ROUTING = "routing"
    TRANSFER = "transfer"
    UNINITIALISED = "uninitialised"
    UNIT = "unit"
    UNREPEATABLE = "unrepeatable"
    UNSEEN = "unseen"
