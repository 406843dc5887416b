"""Output of a node's launcher and ranks, on its way to the log."""

from __future__ import annotations

import os
import re
import selectors

from clusterkit.agent import limits
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.protocol import RANK_ENDED, RANK_HEADER

HEADER = re.compile(re.escape(RANK_HEADER) + rb" ([0-9]{1,9}) ([0-9]{1,9})\Z")
_ENDED = re.compile(re.escape(RANK_ENDED) + rb" ([0-9]{1,9}) ([0-9]{1,3})\Z")
_TAG_OR_END = re.compile(rb"\[[^],\n]{1,40},([0-9]{1,9})\]<std(?:out|err|diag)>:|\n")
_HALF_TAG = re.compile(rb"\[(?:[^]\n]{0,50}|[^]\n]{1,50}\](?:<[a-z]{0,7}>?)?)\Z")


class Tagged:
    """Takes apart what Open MPI's ``--tag-output`` sends: ``[JOB,RANK]<stdout>:TEXT``.

    A line that is written in pieces, or is longer than one of its messages, has a tag before each
    piece, and the pieces of other ranks may come between them.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._speaker = "-"
        self._begun: dict[str, bytes] = {}

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Ranks (``-``: the launcher itself) and lines, those that end here, without their ends."""
        data = self._rest + data
        # Half of a tag, or of a line's end, may have come.
        half = _HALF_TAG.search(data, max(0, len(data) - 64))
        cut = half.start() if half else len(data) - data.endswith(b"\r")
        data, self._rest = data[:cut].replace(b"\r\n", b"\n").replace(b"\r", b"\n"), data[cut:]
        lines = []
        at = 0
        for mark in _TAG_OR_END.finditer(data):
            self._add(data[at : mark.start()])
            at = mark.end()
            if mark[1] is not None:
                self._speaker = mark[1].decode()
            else:
                lines.append((self._speaker, self._begun.pop(self._speaker, b"")))
                self._speaker = "-"
        self._add(data[at:])
        long = [name for name, text in self._begun.items() if len(text) > limits.LONGEST_LINE]
        return lines + [(speaker, self._begun.pop(speaker)) for speaker in long]

    def end(self) -> list[tuple[str, bytes]]:
        """What was begun and has no end."""
        self._add(self._rest.removesuffix(b"\r"))
        left, self._begun, self._rest = list(self._begun.items()), {}, b""
        return left

    def _add(self, text: bytes) -> None:
        if text:
            self._begun[self._speaker] = self._begun.get(self._speaker, b"") + text


class Stream:
    """One source of output: a rank's named pipe, or the launcher's own.

    Args:
        tagged: output of ranks on other hosts comes through it, as `Tagged` says.
    """

    def __init__(self, handle: int, log: NodeLog, *, tagged: bool = False) -> None:
        self.handle = handle
        self.rank = "-"
        self._tagged = Tagged() if tagged else None
        self._log = log
        self._rest = b""

    def pump(self) -> bool:
        """Move what is there to the log; False at the end of the stream."""
        try:
            data = os.read(self.handle, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        if self._tagged is not None:
            self._emit_tagged(self._tagged.feed(data))
            return True
        data = self._rest + data
        # A carriage return at the end may be the first half of a line's end.
        whole = data[:-1] if data.endswith(b"\r") else data
        pieces = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = pieces.pop() + data[len(whole) :]
        if len(self._rest) > limits.LONGEST_LINE:
            pieces.append(self._rest)
            self._rest = b""
        self._emit(pieces)
        return True

    def drain(self) -> None:
        """All that is left, a last line without its newline included."""
        os.set_blocking(self.handle, False)
        before = -1
        while before != (size := len(self._rest)) or self._readable():
            before = size
            if not self.pump():
                break
        if self._rest:
            self._emit([self._rest.removesuffix(b"\r")])
            self._rest = b""
        if self._tagged is not None:
            self._emit_tagged(self._tagged.end())

    def _readable(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self.handle, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _emit_tagged(self, lines: list[tuple[str, bytes]]) -> None:
        for rank, line in lines:
            if rank == "-":
                self._emit([line])
            elif (text := self._without_end(line)) is not None:
                self._log.lines(rank, [text])

    def _without_end(self, line: bytes) -> bytes | None:
        """A line without a rank's word of how it ended; None: it was that alone."""
        if (end := _ENDED.search(line)) is None:
            return line
        self._log.rank_ended(int(end[1]), int(end[2]))
        # Before it may stand a last line that had no end of its own.
        return line[: end.start()] or None

    def _emit(self, lines: list[bytes]) -> None:
        run: list[bytes] = []
        for line in lines:
            if header := HEADER.match(line):
                if run:
                    self._log.lines(self.rank, run)
                    run = []
                self.rank = header[1].decode()
                self._log.rank_started(int(header[1]), int(header[2]))
            elif (text := self._without_end(line)) is not None:
                run.append(text)
        if run:
            self._log.lines(self.rank, run)
