"""Output of a node's launcher and ranks, on its way to the log."""

from __future__ import annotations

import itertools
import os
import re
import selectors
from collections.abc import Iterator

from clusterkit.agent import limits
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.protocol import RANK_ENDED, RANK_HEADER

HEADER = re.compile(re.escape(RANK_HEADER) + rb" ([0-9]{1,9}) ([0-9]{1,9})\Z")
_ENDED = re.compile(re.escape(RANK_ENDED) + rb" ([0-9]{1,9}) ([0-9]{1,3})\Z")
_END = re.compile(rb"\n")
_TAG_OR_END = re.compile(rb"\[[^],\n]{1,40},([0-9]{1,9})\]<std(?:out|err|diag)>:|\n")
_HALF_TAG = re.compile(rb"\[(?:[^]\n]{0,50}|[^]\n]{1,50}\](?:<[a-z]{0,7}>?)?)\Z")


class Lines:
    """Takes output apart into lines; a carriage return ends one, too.

    With ``tagged``, what Open MPI's ``--tag-output`` sends: ``[JOB,RANK]<stdout>:TEXT``. A line
    that is written in pieces, or is longer than one of its messages, has a tag before each piece,
    and the pieces of other ranks may come between them.
    """

    def __init__(self, *, tagged: bool = False) -> None:
        self._tagged = tagged
        self._rest = b""
        self._speaker = "-"
        self._begun: dict[str, bytes] = {}

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Ranks (``-``: no tag) and lines, those that end here, without their ends."""
        data = self._rest + data
        # Half of a tag, or of a line's end, may have come.
        half = _HALF_TAG.search(data, max(0, len(data) - 64)) if self._tagged else None
        cut = half.start() if half else len(data) - data.endswith(b"\r")
        data, self._rest = data[:cut].replace(b"\r\n", b"\n").replace(b"\r", b"\n"), data[cut:]
        lines = []
        at = 0
        for mark in (_TAG_OR_END if self._tagged else _END).finditer(data):
            self._add(data[at : mark.start()])
            at = mark.end()
            if mark.lastindex:
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
        tagged: output of ranks on other hosts comes through it, as `Lines` says.
    """

    def __init__(self, handle: int, log: NodeLog, *, tagged: bool = False) -> None:
        self.handle = handle
        self.rank = "-"
        self._lines = Lines(tagged=tagged)
        self._log = log

    def pump(self) -> bool:
        """Move what is there to the log; False at the end of the stream."""
        try:
            data = os.read(self.handle, 1 << 16)
        except BlockingIOError:
            return True
        self._emit(self._lines.feed(data))
        return bool(data)

    def drain(self) -> None:
        """All that is left, a last line without its newline included."""
        os.set_blocking(self.handle, False)
        while self._readable() and self.pump():
            pass
        self._emit(self._lines.end())

    def _readable(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self.handle, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _emit(self, lines: list[tuple[str, bytes]]) -> None:
        for rank, group in itertools.groupby(self._owned(lines), key=lambda owned: owned[0]):
            texts = [text for _, text in group]
            self._log.lines(rank, texts)
            for text in texts:
                self._log.words.read(rank, text)

    def _owned(self, lines: list[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        """Lines with whose they are; what ranks say of their start and end is taken out."""
        for speaker, line in lines:
            if speaker == "-" and (header := HEADER.match(line)):
                self.rank = header[1].decode()
                self._log.rank_started(int(header[1]), int(header[2]))
                continue
            if end := _ENDED.search(line):
                self._log.rank_ended(int(end[1]), int(end[2]))
                line = line[: end.start()]  # a last line that had no end of its own
            if line or not end:
                yield self.rank if speaker == "-" else speaker, line
