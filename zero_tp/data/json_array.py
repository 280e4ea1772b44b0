"""Split a JSON array into its elements, without parsing them.

The parser of JSON lines then reads each of them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)  # the rest of a string, up to its quote
# Where to stop, at depth 0 and below.
_BETWEEN, _INSIDE = (re.compile(rb'["\[\]{,]'), re.compile(rb'["\[\]{}]'))
_CHUNK = 2**20


def array_elements(file: io.BufferedReader, limit: int) -> Iterator[bytes]:
    """Yield the bytes of each element of an array, whose `[` has been read.

    Brackets, strings and commas are followed, nothing is parsed. So a bad element costs no other.

        {"a": "],"}, nonsense, [2, {}]]     yields {"a": "],"}, then nonsense, then [2, {}]

    The marks in the string mean nothing, and the last `]`, at depth 0, ends the array.

    Args:
        limit: memory bound; the rest of an element of more bytes is skipped, and more than `limit`
            bytes are yielded.

    Raises:
        EOFError: the array does not end, or something follows it.
    """
    element = bytearray()
    depth = 0
    in_string = False
    rest = b""
    is_first = True
    while chunk := file.read1(_CHUNK):
        # Only an escape is carried over. Everything else can be cut anywhere: depth and `in_string`
        # go on in the next chunk.
        data = rest + chunk
        position = 0
        start = 0
        rest = b""
        while position < len(data):
            if in_string:
                match = _STRING.match(data, position)
                assert match is not None  # it may be empty
                position = match.end()
                if data[position:] == b"\\":  # the byte that it escapes is in the next chunk
                    rest = b"\\"
                    break
                # The string goes on in the next chunk, or the match has stopped at the closing
                # quote, which is skipped.
                in_string = position == len(data)
                position = position + 1
                continue
            # A regular expression finds the next mark. A loop over bytes in Python would be far
            # slower.
            match = (_INSIDE if depth else _BETWEEN).search(data, position)
            if match is None:
                break
            mark = match[0]
            position = match.end()
            in_string = mark == b'"'
            if depth or mark in b"[{":
                depth += (mark in b"[{") - (mark in b"]}")
            elif mark in b",]":
                element += data[start : match.start()]
                # `[]` has no element. `[1,]` has an empty second one, which is a bad record.
                if mark == b"," or not is_first or element.strip():
                    yield bytes(element)
                if mark == b"]":
                    _check_end(data[position:], file)
                    return
                is_first = False
                start = position
                element.clear()
        # The rest of a longer element is followed to its end but not kept.
        if len(element) <= limit:
            element += data[start : len(data) - len(rest)]
    raise EOFError("it ends inside the array")


def _check_end(data: bytes, file: io.BufferedReader) -> None:
    while not data.strip():
        if not (data := file.read1(_CHUNK)):
            return
    raise EOFError("text follows the array")
