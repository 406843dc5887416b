"""Sends a run's metrics to experiment trackers, from the marked lines of rank 0.

Threads of the run's supervisor do it, so it can neither end nor delay the run, and neither the
program nor its nodes need the tracker's library. The library reads its key and addresses from the
environment in which the run is submitted; they are stored nowhere.
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
from clusterkit.output.series import LARGEST_STEP, MOST_METRICS
from clusterkit.run.folder import Rank0, RunFolder, home
from clusterkit.run.logs import LogLine
from clusterkit.run.status import State
from clusterkit.spec import JobSpec

SECONDS = 1.0
"""Pause between two reads of the logs."""
END_SECONDS = 30.0
"""How long sending the last metrics may take after the run's end."""


class Tracker(ABC):
    """Sends a run's metrics to one library. If that raises, the run continues without it."""

    rewrites: ClassVar = False
    """Whether it starts with the first line, not where an earlier supervisor stopped."""
    needs: ClassVar[str]
    """The package that pip installs for it."""

    @abstractmethod
    def __init__(self, folder: RunFolder, job: JobSpec) -> None: ...

    @abstractmethod
    def add(self, at: float, step: int, values: dict[str, float]) -> None:
        """Add the metrics of one step, which were reported at a Unix time."""

    def flush(self) -> None:  # noqa: B027 - most libraries flush by themselves
        """Send what was added."""

    @abstractmethod
    def close(self, state: State) -> None:
        """End the tracker's run, in the state in which the run has ended."""


class TensorBoard(Tracker):
    """An event file in the run's folder; replaces that of an earlier supervisor.

    Before a step that is reported again, after a restart from a checkpoint, a session start with
    that step is written: TensorBoard then drops what it has read from that step on.
    """

    rewrites = True
    needs = "clusterkit[track]"

    def __init__(self, folder: RunFolder, job: JobSpec) -> None:
        # These imports take a quarter of a second; tensorboardX would import torch.
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
        # TensorBoard ignores the first start of an event file, unless it has read an earlier file.
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
    """Weights & Biases: a run in the project WANDB_PROJECT, by default the job's name.

    Without a key its files are written to the run's folder, for `wandb sync`. The x-axis is the
    metric ``step``: W&B's own step accepts no step twice.
    """

    needs = "wandb"

    def __init__(self, folder: RunFolder, job: JobSpec) -> None:
        wandb = import_module("wandb")
        # This process is the supervisor: its output, load, code and Git state are not the run's.
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
    """Return whether W&B has a mode or a key."""
    if {"WANDB_API_KEY", "WANDB_MODE"} & os.environ.keys():
        return True
    host = re.sub(r"^https?://", "", os.environ.get("WANDB_BASE_URL", "api.wandb.ai"))
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators(host.rstrip("/")) is not None
    return False


class MLflow(Tracker):
    """A run in the experiment MLFLOW_EXPERIMENT_NAME, by default the job's name.

    The server is MLFLOW_TRACKING_URI, by default `mlflow.db` in CLUSTERKIT_HOME.
    """

    needs = "mlflow"
    _BATCH = 1000  # how many metrics a request can have

    def __init__(self, folder: RunFolder, job: JobSpec) -> None:
        self._metric = import_module("mlflow.entities").Metric
        local = None if "MLFLOW_TRACKING_URI" in os.environ else f"sqlite:///{home() / 'mlflow.db'}"
        self._client = import_module("mlflow.tracking").MlflowClient(tracking_uri=local)
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
            # MLflow refuses names with other characters.
            key = re.sub(r"[^\w\-. :/]", "_", name)
            self._waiting.append(self._metric(key, value, int(at * 1000), step))

    def flush(self) -> None:
        for start in range(0, len(self._waiting), self._BATCH):
            self._client.log_batch(self._run, metrics=self._waiting[start : start + self._BATCH])
        self._waiting.clear()

    def close(self, state: State) -> None:
        ends = {State.SUCCEEDED: "FINISHED", State.CANCELLED: "KILLED"}
        self._client.set_terminated(self._run, ends.get(state, "FAILED"))


class Trackio(Tracker):
    """Trackio: a run in the project with the job's name, where its TRACKIO_... variables say."""

    needs = "trackio"

    def __init__(self, folder: RunFolder, job: JobSpec) -> None:
        trackio = import_module("trackio")
        # The load of this machine, which only submits, is not the run's.
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
    """Raise `BadInput` if a tracker's library is not installed on this machine."""
    for name in job.track:
        found = importlib.util.find_spec(name)
        # A folder of that name, such as one with event files, is no library.
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
    """Send the run's metrics to the job's trackers meanwhile, and then to the end of the logs.

    Args:
        attempt: returns the newest attempt; the logs of earlier ones are complete.
        note: called with the reason if a tracker fails.
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
    saved = f"tracked-{name}.json"
    try:
        tracker = TRACKERS[name](folder, job)
        try:
            # How many lines an earlier supervisor has sent: they are read in the same order again.
            sent = 0 if tracker.rewrites else folder.maybe_json(saved, int) or 0
            lines, names = Rank0(folder), set[str]()
            count, more = 0, True
            while more:
                more = not ended.is_set()
                for line in lines.read(attempt()):
                    if (found := _metrics(line, names)) is not None:
                        count += 1
                        if count > sent:
                            tracker.add(line.time, *found)
                tracker.flush()
                if count > sent:
                    sent = count
                    if not tracker.rewrites:
                        folder.write_json(saved, sent)
                ended.wait(SECONDS)
        finally:
            status = folder.saved_status()
            tracker.close(State.UNKNOWN if status is None else status.state)
    except Exception as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        note(f"track: {name}: {why}; no more of this run is written to it")


def _metrics(line: LogLine, names: set[str]) -> tuple[int, dict[str, float]] | None:
    """Return the step and the values of a line, NaN included; None: it has none.

    Args:
        names: the metrics reported so far; at most MOST_METRICS are added.
    """
    event = line.event
    if event is None or event["event"] != "metrics":
        return None
    step = _float(event.pop("step", None))
    if step is None or not abs(step) < LARGEST_STEP:
        return None
    values = {}
    for name, given in event.items():
        if (value := _float(given)) is not None and (name in names or len(names) < MOST_METRICS):
            names.add(name)
            values[name] = value
    return (int(step), values) if values else None


def _float(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an int can have any number of digits
            return float(value)
    return None
