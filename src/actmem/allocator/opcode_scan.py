"""Look through the opcodes of a pickle before it is read, without acting on any.

Python's unpickler keeps a table of what it has read, and one opcode of five bytes can make that table so large that no
memory is left. No pickle that was written by a program has more entries than bytes.
"""

import pickletools

__all__ = ["has_small_table"]

_NEWLINES = {
    "decimalnl_short": 1,
    "decimalnl_long": 1,
    "floatnl": 1,
    "stringnl": 1,
    "stringnl_noescape": 1,
    "stringnl_noescape_pair": 2,
    "unicodestringnl": 1,
}
_WIDTHS = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT8U: 8}
_LONG_BINPUT, _PUT = ord("r"), ord("p")


def _lengths() -> tuple[list[int], dict[int, int], dict[int, int]]:
    """Return the fixed lengths of arguments by opcode, the widths of length prefixes, and the numbers of lines."""
    fixed, prefixed, lines = [-1] * 256, dict[int, int](), dict[int, int]()
    for opcode in pickletools.opcodes:
        code, argument = ord(opcode.code), opcode.arg
        if argument is None:
            fixed[code] = 0
        elif argument.n >= 0:
            fixed[code] = argument.n
        elif argument.name in _NEWLINES:
            lines[code] = _NEWLINES[argument.name]
        else:
            prefixed[code] = _WIDTHS.get(argument.n, 4)
    return fixed, prefixed, lines


_FIXED, _PREFIXED, _LINES = _lengths()


def has_small_table(data: bytes) -> bool:
    """Return whether the table of a pickle stays smaller than the pickle itself.

    >>> import pickle
    >>> has_small_table(pickle.dumps({"segments": []})), has_small_table(b"Nr" + bytes([255] * 4) + b".")
    (True, False)
    """
    at, end = 0, len(data)
    fixed = _FIXED
    while at < end:
        code = data[at]
        length = fixed[code]
        if length >= 0:
            if code == _LONG_BINPUT and int.from_bytes(data[at + 1 : at + 5], "little") > end:
                return False
            at += 1 + length
        elif code in _PREFIXED:
            width = _PREFIXED[code]
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
        elif code in _LINES:
            start = at + 1
            for _ in range(_LINES[code]):
                at = data.find(b"\n", at + 1)
                if at < 0:
                    return True  # cut off: the unpickler says so
            if code == _PUT:
                digits = data[start:at].lstrip(b"0") or b"0"
                if not digits.isdigit() or len(digits) > 18 or int(digits) > end:
                    return False
            at += 1
        else:
            return True  # no opcode: the unpickler says so
    return True
