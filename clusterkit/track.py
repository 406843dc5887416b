"""A run's metrics for a tracker, written where runs are submitted, from the marked lines of rank 0.

The run's supervisor does it beside its work: nothing of it can end a run or hold it up, and neither
the program nor its nodes need the tracker's library.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clusterkit.errors import BadInput
from clusterkit.logs import LogLine
from clusterkit.runs import Rank0, RunFolder
from clusterkit.series import MOST_METRICS
from clusterkit.spec import JobSpec

SECONDS = 1.0
"""Between two looks at the logs."""
END_SECONDS = 10.0
"""How long what a run wrote last may take to write, after its end."""
_MOST_STEPS = 1 << 62


class TensorBoard:
    """An event file in the run's folder, in place of the one that an earlier supervisor wrote.

    Where a step is reported again, after a restart from a checkpoint, the mark of a start from that
    step is written first: TensorBoard then leaves out what it has read from that step on.

    Raises:
        OSError: it cannot be written.
        ImportError: the library is not installed, or damaged.
    """

    def __init__(self, run: Path) -> None:
        # What these import takes a quarter of a second; tensorboardX would import torch.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._start, self._summary = Event, SessionLog.START, Summary
        folder = run / "tensorboard"
        folder.mkdir(exist_ok=True)
        for old in folder.glob("events.out.tfevents.*.clusterkit"):
            old.unlink()
        now = time.time()
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.clusterkit"
        self._file = RecordWriter((folder / name).open("wb"))
        self._last: dict[str, int] = {}
        self._write(wall_time=now, file_version="brain.Event:2")
        # Of an event file the first start is no restart; in place of an earlier file it is one.
        self._write(wall_time=now, session_log={"status": self._start})

    def add(self, at: float, step: int, values: dict[str, float]) -> None:
        """What was reported of one step."""
        if any(self._last.get(name, step - 1) >= step for name in values):
            self._write(wall_time=at, step=step, session_log={"status": self._start})
            self._last = {name: min(last, step - 1) for name, last in self._last.items()}
        summary = self._summary()
        for name, value in values.items():
            if name in self._last or len(self._last) < MOST_METRICS:
                self._last[name] = step
                summary.value.add(tag=name, simple_value=value)
        if summary.value:
            self._write(wall_time=at, step=step, summary=summary)

    def _write(self, **fields: Any) -> None:
        self._file.write(self._event(**fields).SerializeToString())

    def flush(self) -> None:
        """Let readers see all of it."""
        self._file.flush()

    def close(self) -> None:
        """There is no more."""
        self._file.close()


TRACKERS = {"tensorboard": TensorBoard}


def check_trackers(job: JobSpec) -> None:
    """Refuse a job whose metrics nothing on this machine can write.

    Raises:
        BadInput: a library is not installed.
    """
    for name in job.track:
        found = importlib.util.find_spec(name)
        # A folder of that name, such as one of event files, is no library.
        if found is None or found.origin is None:
            raise BadInput(
                f"track: {name} is not installed on this machine, which submits",
                hint="pip install 'clusterkit[track]'",
                job="track",
            )


@contextlib.contextmanager
def tracking(
    job: JobSpec, folder: RunFolder, attempt: Callable[[], int], note: Callable[[str], None]
) -> Iterator[None]:
    """Have the job's trackers written while this runs, and to the end of the logs after it.

    Args:
        attempt: the newest; the logs of those before it are whole.
        note: is given why one is not written any more.
    """
    ended = threading.Event()
    threads = {
        name: threading.Thread(
            target=_track, args=(name, folder, attempt, note, ended), daemon=True
        )
        for name in dict.fromkeys(job.track)
    }
    for thread in threads.values():
        thread.start()
    try:
        yield
    finally:
        ended.set()
        deadline = time.monotonic() + END_SECONDS
        for name, thread in threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                note(f"track: {name}: the last metrics took longer than {END_SECONDS:g} s")


def _track(
    name: str,
    folder: RunFolder,
    attempt: Callable[[], int],
    note: Callable[[str], None],
    ended: threading.Event,
) -> None:
    try:
        with contextlib.closing(TRACKERS[name](folder.path)) as tracker:
            lines = Rank0(folder)
            more = True
            while more:
                more = not ended.is_set()
                for line in lines.read(attempt()):
                    if (found := _metrics(line)) is not None:
                        tracker.add(line.time, *found)
                tracker.flush()
                ended.wait(SECONDS)
    except Exception as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        note(f"track: {name}: {why}; no more of this run is written to it")


def _metrics(line: LogLine) -> tuple[int, dict[str, float]] | None:
    """Step and values of a line; a loss that is no number (NaN) is one here."""
    event = line.event
    if event is None or event["event"] != "metrics":
        return None
    values = {}
    for name, value in event.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # an int may have any number of digits
                values[name] = float(value)
    step = values.pop("step", None)
    return (int(step), values) if step is not None and abs(step) < _MOST_STEPS else None
