"""Send a snapshot of the project to hosts; each gets what it does not have.

The hosts' half, and the protocol, is `clusterkit.sync.receiver`.
"""

from __future__ import annotations

import contextlib
import json
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from clusterkit.errors import SubmitFailed
from clusterkit.plan import Tree
from clusterkit.sync import receiver
from clusterkit.sync.relay import Relay
from clusterkit.sync.snapshot import Snapshot
from clusterkit.transport import Stream, Transport

QUIET_SECONDS = 120.0
"""For a host to answer."""
CACHED_BYTES = 1 << 28
"""A project up to this size is read and compressed once for all hosts."""
BATCH_BYTES = 1 << 18
"""Pieces are written together until they are so many bytes: each write costs a packet at least."""
_SAMPLE_BYTES = 1 << 14
_BOOT = "import sys;exec(compile(sys.stdin.buffer.read({}),'receiver','exec'))"

Piece = tuple[int, bytes]
"""How many bytes of a file it holds; header and data as the receiver reads them."""
Progress = Callable[[str, int, int], None]
"""Gets the host, bytes sent and bytes to send."""


class Upload:
    """A snapshot on its way to the folder ``tree.path`` of hosts; safe to use from several threads.

    Args:
        relay: of the hosts that get the same folder; None: all of it comes from this machine.
        run_dir: the folder on the hosts of the run that uses it: it is kept for that run.
        ended: whether a run, by its id, has ended for good: it needs its project no more.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        tree: Tree,
        relay: Relay | None = None,
        *,
        run_dir: str | None = None,
        ended: Callable[[str], bool] = lambda run_id: False,
    ) -> None:
        self._snapshot, self._tree, self._relay = snapshot, tree, relay
        self._run_dir, self._ended = run_dir, ended
        self._listing = zlib.compress(snapshot.listing, 1)
        self._pieces: dict[tuple[int, bool], list[Piece]] = {}
        """Of files that were read for one host, for the other hosts."""
        self._reading = threading.Lock()

    def send(
        self,
        host: str,
        python: str,
        transport: Transport,
        progress: Progress = lambda host, done, size: None,
    ) -> int:
        """Have the folder on a host hold exactly this snapshot.

        Returns:
            Files that had to be sent.

        Raises:
            SubmitFailed: no space, no permission, or the folder changes while it is copied.
            Unavailable: the host cannot be reached.
        """
        relay, entries = self._relay, self._snapshot.entries
        program = Path(receiver.__file__).read_bytes()
        request = {
            "path": self._tree.path, "relay": relay and relay.token, "run": self._run_dir,
        }  # fmt: skip
        listing = receiver.COUNT.pack(len(self._listing)) + self._listing
        # File names are bytes to both sides, whatever the locale there; no package is needed.
        argv = [python, "-I", "-S", "-X", "utf8", "-c", _BOOT.format(len(program))]
        with contextlib.ExitStack() as connection, contextlib.ExitStack() as sending:
            stream = connection.enter_context(transport.open(host, argv))
            stream.write(program + json.dumps(request).encode() + b"\n" + listing)
            answers = _answers(stream, host)
            answer = next(answers)
            missing = answer.get("missing", [])
            size = sum(entries[number].size for number in missing)

            def send_files(numbers: Sequence[int]) -> dict[str, Any]:
                for done, data in _batches(self.pieces(numbers, zipped=not stream.low_latency)):
                    stream.write(data)
                    progress(host, done, size)
                return next(answers)

            sender = None
            if "error" not in answer:
                progress(host, 0, size)
                if relay is not None and missing:
                    # Kept until this host serves as well: the next one shall take it from there.
                    sender = sending.enter_context(relay.sender(size))
                    stream.write(json.dumps({"from": sender}).encode() + b"\n")
                answer = next(answers) if sender else send_files(missing)
                if relay is not None and "missing" in answer:
                    relay.drop(sender)
                    answer = send_files(answer["missing"])
            if "error" in answer:
                raise self._refused(host, str(answer["error"]))
            if (runs := answer.get("used_by")) is not None:
                ended = list(filter(self._ended, map(str, runs)))
                stream.write(json.dumps({"ended": ended}).encode() + b"\n")
                if "error" in (answer := next(answers)):
                    raise self._refused(host, str(answer["error"]))
            progress(host, size, size)
            if relay is not None and relay.worthwhile(size):
                stream.write(b"\n")
                if (port := next(answers).get("port")) is not None:
                    relay.add(host, port, connection.pop_all())
            return len(missing)

    def _refused(self, host: str, error: str) -> SubmitFailed:
        hint = "make room there, or choose another `workdir` that this user may write to"
        if "changed while" in error:
            hint = "submit again"
        root, path = self._snapshot.root, self._tree.path
        return SubmitFailed(f"host {host}: cannot copy {root} to {path}: {error}", hint)

    def pieces(self, missing: Sequence[int], zipped: bool = True) -> Iterator[Piece]:
        """Yield the contents of the entries that a host misses.

        Args:
            zipped: compress what becomes smaller by that.

        Raises:
            SubmitFailed: a file cannot be read any more.
        """
        for number in missing:
            if self._snapshot.entries[number].target is None:
                yield from self._file_pieces(number, zipped)

    def _file_pieces(self, number: int, zipped: bool) -> Iterable[Piece]:
        if self._snapshot.size > CACHED_BYTES:
            return self._read(number, zipped)
        with self._reading:
            if (number, zipped) not in self._pieces:
                self._pieces[number, zipped] = list(self._read(number, zipped))
            return self._pieces[number, zipped]

    def _read(self, number: int, zipped: bool) -> Iterator[Piece]:
        entry = self._snapshot.entries[number]
        path = self._snapshot.root / entry.path
        try:
            for data, flags in receiver.read_pieces(path, entry.size):
                packed = _smaller(data) if zipped else data
                flags |= 0 if packed is data else receiver.ZIPPED
                yield len(data), receiver.HEADER.pack(number, flags, len(packed)) + packed
        except OSError as error:
            raise SubmitFailed(
                f"{path}: {(error.strerror or 'unreadable').lower()} while it was copied",
                hint="submit again",
            ) from None


def _smaller(data: bytes) -> bytes:
    """Return the data compressed, or itself where that hardly helps."""
    sample = data[:_SAMPLE_BYTES]
    if len(data) <= 512 or len(packed := zlib.compress(sample, 1)) >= 0.8 * len(sample):
        return data
    return packed if len(sample) == len(data) else zlib.compress(data, 1)


def _batches(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join small pieces; yield how many bytes of files have been sent by then, and the data."""
    batch: list[bytes] = []
    done = size = 0
    for length, piece in pieces:
        batch.append(piece)
        done += length
        size += len(piece)
        if size >= BATCH_BYTES:
            yield done, b"".join(batch)
            batch, size = [], 0
    if batch:
        yield done, b"".join(batch)


def _answers(stream: Stream, host: str) -> Iterator[dict[str, Any]]:
    """Yield the host's answers, without those that only say that it is still waiting."""
    rest = b""
    while True:
        while b"\n" not in rest:
            data = stream.read(QUIET_SECONDS)
            if not data:
                error = stream.stderr.strip().rpartition("\n")[2]
                raise SubmitFailed(f"host {host}: copying the project was interrupted: {error}")
            rest += data
        line, _, rest = rest.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            raise SubmitFailed(
                f"host {host}: copying the project was interrupted: {line[:200]!r}"
            ) from None
        if "waiting" not in answer:
            yield answer
