"""Sends the new files of a run folder from a login node to a submitter without access to its disk.

The other end is `clusterkit.backends.slurm.login`, which sends the text of this module to the login
node, where the ranks' Python runs it: standard library only. The input is ``{"folder": ..,
"attempt": .., "follow": .., "sizes": {NAME: BYTES}, "whole": [NAME], "growing": [NAME]}``; the last
two are names of files in a node's folder. The output is frames as of `clusterkit.agent.report`,
whose files have paths relative to the run folder. A frame without a file ends each round that had
news, serves as heartbeat, and tells in ``begun`` whether the first round is complete.
"""

from __future__ import annotations

import glob
import json
import os
import sys
import time
from typing import Any

LOOK_SECONDS = 0.5
"""Between two rounds, each of which makes several requests to a file server."""
HEARTBEAT_SECONDS = 2.0
PIECE_BYTES = 1 << 20
GONE = 2
"""Exit code if the run folder does not exist."""


class Tail:
    """Sends what is new since the round before."""

    def __init__(
        self, attempt: int, sizes: dict[str, int], whole: list[str], growing: list[str]
    ) -> None:
        self.attempt, self.growing = attempt, growing
        *self.first, self.last = whole
        self.sizes = sizes
        """Bytes of each growing file that the reader has already."""
        self.sent: dict[str, bytes] = {}
        self.ended: set[str] = set()
        self.begun = False
        """Whether the first round is complete."""
        self.news = False
        self._due = time.monotonic() + HEARTBEAT_SECONDS

    def round(self) -> None:
        """Send what is new in the run folder."""
        ours = f"attempts/{self.attempt}"
        begun_after = _read(f"{ours}/next")
        for name in (f"job-{self.attempt}", *glob.glob("stop-*")):
            self.whole(name, _read(name))
        for name in glob.glob("slurm-*.out"):
            self.grown(name)
        for node in sorted(glob.glob(f"{ours}/node-*")):
            if node not in self.ended:
                self.node(node)
                self.heartbeat()  # with many nodes and a slow file server, a round takes long
        self.whole(f"{ours}/next", begun_after)
        first, self.begun = not self.begun, True
        self.heartbeat(first or self.news)

    def node(self, node: str) -> None:
        # exit.json is read first and sent last, so that its reader has the complete log.
        ended = _read(f"{node}/{self.last}")
        for name in self.first:
            self.whole(f"{node}/{name}", _read(f"{node}/{name}"))
        for name in self.growing:
            self.grown(f"{node}/{name}")
        self.whole(f"{node}/{self.last}", ended)
        if ended is not None:
            self.ended.add(node)

    def whole(self, name: str, data: bytes | None) -> None:
        if data is not None and self.sent.get(name) != data:
            self.sent[name] = data
            self.frame({"file": name}, data)

    def grown(self, name: str) -> None:
        at = self.sizes.get(name, 0)
        while data := _read(name, at):
            self.frame({"file": name, "at": at}, data)
            self.sizes[name] = at = at + len(data)

    def frame(self, header: dict[str, Any], data: bytes = b"") -> None:
        self.news = True
        out = sys.stdout.buffer
        out.write(json.dumps({**header, "bytes": len(data)}).encode() + b"\n" + data)

    def heartbeat(self, now: bool = False) -> None:
        """Send a frame without a file, if one is due, or ``now``."""
        if now or time.monotonic() >= self._due:
            self.frame({"begun": self.begun, "alive": True, "ended": False})
            self.news, self._due = False, time.monotonic() + HEARTBEAT_SECONDS
            sys.stdout.buffer.flush()


def _read(name: str, at: int = 0) -> bytes | None:
    try:
        with open(name, "rb") as file:
            file.seek(at)
            return file.read(PIECE_BYTES)
    except OSError:
        return None


def main() -> int:
    request = json.load(sys.stdin)
    try:
        os.chdir(request["folder"])
    except OSError as error:
        print(error.strerror, file=sys.stderr)
        return GONE
    tail = Tail(request["attempt"], request["sizes"], request["whole"], request["growing"])
    while True:
        tail.round()
        if not request["follow"]:
            return 0
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader is gone
        os._exit(0)
