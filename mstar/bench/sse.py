"""Server-sent events out of a byte stream cut anywhere. A state machine with no I/O, one object per stream.

Only `data:` matters here; `event:`, `id:`, `retry:` and comments are skipped. Lines end in LF or CRLF (the standard's lone CR is sent by no
server). An event ends at an empty line; one left open at the end of the stream is dropped, as the standard says.
Source: WHATWG HTML, "Server-sent events", 9.2.6.
"""

from __future__ import annotations


class SseParser:
    """Feed bytes, take the `data` of each event that they complete."""

    def __init__(self) -> None:
        self._tail = b""  # an unfinished line
        self._data: list[bytes] = []  # the data lines of the open event

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that ends in `chunk`, in order; lines of one event are joined by LF."""
        *lines, self._tail = (self._tail + chunk).split(b"\n")
        complete: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                complete.append(b"\n".join(self._data))
                self._data = []
        return complete
