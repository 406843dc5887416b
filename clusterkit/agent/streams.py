"""Read the output of a node's launcher and ranks into its log."""

from __future__ import annotations

import itertools
import os
import re
import select
import selectors
import time
from collections.abc import Iterator, Sequence

from clusterkit.agent import host, limits
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.protocol import RANK_ENDED, RANK_HEADER, REMARK

HEADER = re.compile(re.escape(RANK_HEADER) + rb" ([0-9]{1,9}) ([0-9]{1,9})\Z")
_ENDED = re.compile(re.escape(RANK_ENDED) + rb" ([0-9]{1,9}) ([0-9]{1,3})\Z")
_END = re.compile(rb"\n")
_TAG_OR_END = re.compile(rb"\[[^],\n]{1,40},([0-9]{1,9})\]<std(?:out|err|diag)>:|\n")
_HALF_TAG = re.compile(rb"\[(?:[^]\n]{0,50}|[^]\n]{1,50}\](?:<[a-z]{0,7}>?)?)\Z")


class Lines:
    """Split output into lines; a carriage return ends one, too.

    With ``tagged`` the output is that of Open MPI's ``--tag-output``: ``[JOB,RANK]<stdout>:TEXT``.
    A line that is written in pieces, or is longer than one of its messages, has a tag before each
    piece, and pieces of other ranks may come between them.
    """

    def __init__(self, *, tagged: bool = False) -> None:
        self._tagged = tagged
        self._rest = b""
        self._rank = "-"
        self._unfinished: dict[str, bytes] = {}

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Return the lines that end in this data, each with its rank (``-``: no tag)."""
        data = self._rest + data
        # The data may end in the middle of a tag, or of a line's end.
        half = _HALF_TAG.search(data, max(0, len(data) - 64)) if self._tagged else None
        cut = half.start() if half else len(data) - data.endswith(b"\r")
        data, self._rest = data[:cut].replace(b"\r\n", b"\n").replace(b"\r", b"\n"), data[cut:]
        lines = []
        start = 0
        for mark in (_TAG_OR_END if self._tagged else _END).finditer(data):
            self._add(data[start : mark.start()])
            start = mark.end()
            if mark.lastindex:
                self._rank = mark[1].decode()
            else:
                lines.append((self._rank, self._unfinished.pop(self._rank, b"")))
                self._rank = "-"
        self._add(data[start:])
        long = [name for name, text in self._unfinished.items() if len(text) > limits.LONGEST_LINE]
        return lines + [(rank, self._unfinished.pop(rank)) for rank in long]

    def end(self) -> list[tuple[str, bytes]]:
        """Return the unfinished lines, at the end of the output."""
        self._add(self._rest.removesuffix(b"\r"))
        left, self._unfinished, self._rest = list(self._unfinished.items()), {}, b""
        return left

    def _add(self, text: bytes) -> None:
        if text:
            self._unfinished[self._rank] = self._unfinished.get(self._rank, b"") + text


class Stream:
    """One source of output: a rank's named pipe, or the launcher's own output.

    Args:
        tagged: lines of ranks on other hosts come through it, with tags as in `Lines`.
    """

    def __init__(self, handle: int, log: NodeLog, *, tagged: bool = False) -> None:
        self.handle = handle
        self.rank = "-"
        self._lines = Lines(tagged=tagged)
        self._log = log

    def pump(self) -> bool:
        """Move available output to the log; return False at the end of the stream."""
        try:
            data = os.read(self.handle, 1 << 16)
        except BlockingIOError:
            return True
        self._emit(self._lines.feed(data))
        return bool(data)

    def drain(self) -> None:
        """Log all that is left, also a last line without a newline."""
        os.set_blocking(self.handle, False)
        while self._readable() and self.pump():
            pass
        self._emit(self._lines.end())

    def _readable(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self.handle, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _emit(self, lines: list[tuple[str, bytes]]) -> None:
        for rank, group in itertools.groupby(self._with_ranks(lines), key=lambda pair: pair[0]):
            texts = [text for _, text in group]
            self._log.lines(rank, texts)
            output = self._log.output
            told = output.over_sockets
            for text in texts:
                output.read(rank, text)
            if output.over_sockets and not told and (remark := host.unused_infiniband()):
                self._log.warn(remark)

    def _with_ranks(self, lines: list[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        """Yield lines with their ranks, without those by which ranks report start and end."""
        for rank, line in lines:
            if rank == self.rank == "-" and line.startswith(REMARK):
                self._log.warn(line[len(REMARK) :].decode(errors="replace"))
                continue
            if rank == "-" and (header := HEADER.match(line)):
                self.rank = header[1].decode()
                self._log.rank_started(int(header[1]), int(header[2]))
                continue
            if end := _ENDED.search(line):
                self._log.rank_ended(int(end[1]), int(end[2]))
                line = line[: end.start()]  # a last line that had no end of its own
            if line or not end:
                yield self.rank if rank == "-" else rank, line


def pump(streams: Sequence[Stream], seconds: float) -> None:
    """Log what comes through them for so long."""
    poll, until = select.poll(), time.monotonic() + seconds
    by_handle = {stream.handle: stream for stream in streams}
    for handle in by_handle:
        poll.register(handle, select.POLLIN)
    while (left := until - time.monotonic()) > 0:
        for handle, _ in poll.poll(left * 1000):
            by_handle[handle].pump()
