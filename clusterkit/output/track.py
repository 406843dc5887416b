"""A run's metrics for a tracker, written where runs are submitted, from the marked lines of rank 0.

The run's supervisor does it beside its work: nothing of it can end a run or hold it up, and neither
the program nor its nodes need the tracker's library. A tracker takes its key and its addresses from
the environment in which the run is submitted, as its library does: nothing of them is written down.
"""

from __future__ import annotations

import contextlib
import importlib.util
import netrc
import os
import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, ClassVar

from clusterkit.errors import BadInput
from clusterkit.output.logs import LogLine
from clusterkit.output.series import LARGEST_STEP, MOST_METRICS
from clusterkit.run.folder import Rank0, RunFolder, home
from clusterkit.run.status import State
from clusterkit.spec import JobSpec

SECONDS = 1.0
"""Between two looks at the logs."""
END_SECONDS = 30.0
"""How long what a run wrote last may take to write, after its end."""


class Tracker(ABC):
    """What writes a run's metrics; whatever its library raises, the run goes on without it."""

    anew: ClassVar = False
    """It begins from the first line whatever an earlier supervisor has written; others go on."""
    needs: ClassVar[str]
    """What pip installs for it."""

    @abstractmethod
    def __init__(self, folder: RunFolder, job: JobSpec) -> None: ...

    @abstractmethod
    def add(self, at: float, step: int, values: dict[str, float]) -> None:
        """What was reported of one step, at a Unix time."""

    def flush(self) -> None:  # noqa: B027 - most send by themselves
        """Let readers see all of it."""

    @abstractmethod
    def close(self, state: State) -> None:
        """There is no more: so the run has ended."""


class TensorBoard(Tracker):
    """An event file in the run's folder, in place of the one that an earlier supervisor wrote.

    Where a step is reported again, after a restart from a checkpoint, the mark of a start from that
    step is written first: TensorBoard then leaves out what it has read from that step on.
    """

    anew = True
    needs = "clusterkit[track]"

    def __init__(self, folder: RunFolder, job: JobSpec) -> None:
        # What these import takes a quarter of a second; tensorboardX would import torch.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._start, self._summary = Event, SessionLog.START, Summary
        files = folder.file("tensorboard")
        files.mkdir(exist_ok=True)
        for old in files.glob("events.out.tfevents.*.clusterkit"):
            old.unlink()
        now = time.time()
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.clusterkit"
        self._file = RecordWriter((files / name).open("wb"))
        self._last: dict[str, int] = {}
        self._write(wall_time=now, file_version="brain.Event:2")
        # Of an event file the first start is no restart; in place of an earlier file it is one.
        self._write(wall_time=now, session_log={"status": self._start})

    def add(self, at: float, step: int, values: dict[str, float]) -> None:
        if any(self._last.get(name, step - 1) >= step for name in values):
            self._write(wall_time=at, step=step, session_log={"status": self._start})
            self._last = {name: min(last, step - 1) for name, last in self._last.items()}
        summary = self._summary()
        for name, value in values.items():
            self._last[name] = step
            summary.value.add(tag=name, simple_value=value)
        self._write(wall_time=at, step=step, summary=summary)

    def _write(self, **fields: Any) -> None:
        self._file.write(self._event(**fields).SerializeToString())

    def flush(self) -> None:
        self._file.flush()

    def close(self, state: State) -> None:
        self._file.close()


class WandB(Tracker):
    """Weights & Biases: a run of the project that is named as the job, or by WANDB_PROJECT.

    Without a key its files are written to the run's folder, for `wandb sync`. Values stand by
    ``step``, not by its own count, which takes no step twice.
    """

    needs = "wandb"

    def __init__(self, folder: RunFolder, job: JobSpec) -> None:
        wandb = import_module("wandb")
        # Nothing of this process is theirs: neither its output, its load, nor where it stands.
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", job.name),
            name=folder.run_id,
            id=folder.run_id,
            resume="allow",
            dir=folder.path,
            mode=None if _has_key() else "offline",
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")

    def add(self, at: float, step: int, values: dict[str, float]) -> None:
        self._run.log({**values, "step": step, "_timestamp": at})

    def close(self, state: State) -> None:
        self._run.finish(exit_code=int(state is not State.SUCCEEDED))


def _has_key() -> bool:
    """Whether W&B has been told what to do, or could log in."""
    if {"WANDB_API_KEY", "WANDB_MODE"} & os.environ.keys():
        return True
    host = re.sub(r"^https?://", "", os.environ.get("WANDB_BASE_URL", "api.wandb.ai"))
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators(host.rstrip("/")) is not None
    return False


class MLflow(Tracker):
    """A run of the experiment that is named as the job, or by MLFLOW_EXPERIMENT_NAME.

    It goes to MLFLOW_TRACKING_URI, or without one to `mlflow.db` beside the runs of this machine.
    """

    needs = "mlflow"
    _MOST = 1000  # metrics that one request may have

    def __init__(self, folder: RunFolder, job: JobSpec) -> None:
        self._metric = import_module("mlflow.entities").Metric
        here = None if "MLFLOW_TRACKING_URI" in os.environ else f"sqlite:///{home() / 'mlflow.db'}"
        self._client = import_module("mlflow.tracking").MlflowClient(tracking_uri=here)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", job.name)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        ours = f"tags.clusterkit = '{folder.run_id}'"
        for run in self._client.search_runs([number], ours):
            self._run = run.info.run_id
            break
        else:
            tags = {"clusterkit": folder.run_id}
            made = self._client.create_run(number, tags=tags, run_name=folder.run_id)
            self._run = made.info.run_id
        self._waiting: list[Any] = []

    def add(self, at: float, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            # Of a name that it does not take the rest is as it was.
            key = re.sub(r"[^\w\-. :/]", "_", name)
            self._waiting.append(self._metric(key, value, int(at * 1000), step))

    def flush(self) -> None:
        for start in range(0, len(self._waiting), self._MOST):
            self._client.log_batch(self._run, metrics=self._waiting[start : start + self._MOST])
        self._waiting.clear()

    def close(self, state: State) -> None:
        ends = {State.SUCCEEDED: "FINISHED", State.CANCELLED: "KILLED"}
        self._client.set_terminated(self._run, ends.get(state, "FAILED"))


class Trackio(Tracker):
    """A run of the project that is named as the job, in Trackio's own folder, or where TRACKIO_...
    variables say."""

    needs = "trackio"

    def __init__(self, folder: RunFolder, job: JobSpec) -> None:
        trackio = import_module("trackio")
        # Of this machine, which only submits, it need not log the load.
        self._run = trackio.init(
            project=job.name,
            name=folder.run_id,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def add(self, at: float, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step)

    def close(self, state: State) -> None:
        self._run.finish()


TRACKERS: Mapping[str, type[Tracker]] = {
    "tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio
}  # fmt: skip
"""By the name of their library."""


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
                hint=f"pip install '{TRACKERS[name].needs}'",
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
            target=_track, args=(name, job, folder, attempt, note, ended), daemon=True
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
    job: JobSpec,
    folder: RunFolder,
    attempt: Callable[[], int],
    note: Callable[[str], None],
    ended: threading.Event,
) -> None:
    kept = f"tracked-{name}.json"
    try:
        tracker = TRACKERS[name](folder, job)
        try:
            # What an earlier supervisor has written, in lines: they come in the same order again.
            written = 0 if tracker.anew else folder.maybe_json(kept, int) or 0
            lines, names = Rank0(folder), set[str]()
            count, more = 0, True
            while more:
                more = not ended.is_set()
                for line in lines.read(attempt()):
                    if (found := _metrics(line, names)) is not None:
                        count += 1
                        if count > written:
                            tracker.add(line.time, *found)
                tracker.flush()
                if count > written:
                    written = count
                    if not tracker.anew:
                        folder.write_json(kept, written)
                ended.wait(SECONDS)
        finally:
            status = folder.saved_status()
            tracker.close(State.UNKNOWN if status is None else status.state)
    except Exception as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        note(f"track: {name}: {why}; no more of this run is written to it")


def _metrics(line: LogLine, names: set[str]) -> tuple[int, dict[str, float]] | None:
    """Step and values of a line; a loss that is no number (NaN) is one here.

    Args:
        names: that were reported so far; beyond the most that are kept there are no new ones.
    """
    event = line.event
    if event is None or event["event"] != "metrics":
        return None
    step = _float(event.pop("step", None))
    if step is None or not abs(step) < LARGEST_STEP:
        return None
    values = {}
    for name, said in event.items():
        if (value := _float(said)) is not None and (name in names or len(names) < MOST_METRICS):
            names.add(name)
            values[name] = value
    return (int(step), values) if values else None


def _float(value: object) -> float | None:
    """A number; None for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an int may have any number of digits
            return float(value)
    return None
