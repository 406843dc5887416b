"""What the nodes of a run have written, for a submitter who does not see their disk: the half of
the login node (the other one is `clusterkit.backends.slurm.login`).

Standard library only: its text is sent to the login node and run there by the ranks' Python. Its
input is ``{"folder": .., "attempt": .., "follow": .., "sizes": {NAME: BYTES}, "whole": [NAME],
"growing": [NAME]}``, of which the last two are those of a node's folder; its output are
frames, as of `clusterkit.agent.report`, whose files have paths below the run's folder. One without
a file says whether the first round is over; it closes a round that had news, and is a sign of life.
"""

from __future__ import annotations

import glob
import json
import os
import sys
import time
from typing import Any

LOOK_SECONDS = 0.5
"""Between two rounds: each is some requests to a file server."""
HEARTBEAT_SECONDS = 2.0
PIECE_BYTES = 1 << 20
GONE = 2
"""Exit code where there is no such run."""


class Tail:
    """Remembers what it has sent."""

    def __init__(
        self, attempt: int, sizes: dict[str, int], whole: list[str], growing: list[str]
    ) -> None:
        self.attempt, self.growing = attempt, growing
        *self.first, self.last = whole
        self.sizes = sizes
        """Bytes of growing files that the reader has."""
        self.sent: dict[str, bytes] = {}
        self.ended: set[str] = set()
        self.begun = False
        """Whether all has been sent that there was at first."""
        self.news = False
        self._due = time.monotonic() + HEARTBEAT_SECONDS

    def round(self) -> None:
        """Send what is new."""
        ours = f"attempts/{self.attempt}"
        begun_after = _read(f"{ours}/next")
        for name in (f"job-{self.attempt}", *glob.glob("stop-*")):
            self.whole(name, _read(name))
        for name in glob.glob("slurm-*.out"):
            self.grown(name)
        for node in sorted(glob.glob(f"{ours}/node-*")):
            if node not in self.ended:
                self.node(node)
                self.heartbeat()  # a file server may be slow, and nodes many
        self.whole(f"{ours}/next", begun_after)
        first, self.begun = not self.begun, True
        self.heartbeat(first or self.news)

    def node(self, node: str) -> None:
        # In this order: when the node has ended, its log is whole.
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
        """A sign of life, where one is due or wanted."""
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
    asked = json.load(sys.stdin)
    try:
        os.chdir(asked["folder"])
    except OSError as error:
        print(error.strerror, file=sys.stderr)
        return GONE
    tail = Tail(asked["attempt"], asked["sizes"], asked["whole"], asked["growing"])
    while True:
        tail.round()
        if not asked["follow"]:
            return 0
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # nobody listens any more
        os._exit(0)
