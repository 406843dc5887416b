"""One run, one fault, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterkit import agent, api
from clusterkit.backends.compose.compose_file import container_name
from clusterkit.errors import ClusterkitError, RunFolderError
from clusterkit.run.folder import RunFolder
from clusterkit.run.status import RunStatus, State
from tests.chaos.faults import Fault
from tests.chaos.places import Local, pod_name

STEPS, RANKS, EVERY = 20, 4, 4
SOON = 90.0
"""Seconds after which something hangs."""
MOMENTS = (
    "", *("runs/*", "runs/*/run.json", "runs/*/facts.json", "runs/*/plan.json"),
    *("runs/*/state.json", "runs/*/steps.jsonl", "runs/*/supervisor.json"),
    *("runs/*/attempts/1/node-*/started.json", "runs/*/attempts/1/node-*/log"),
)  # fmt: skip
"""Files that a submit brings about, in their order: an early fault comes just after one of them."""
UNSTARTED = "clusterkit was killed before the run started"
PROGRAM = Path(__file__).with_name("program.py")


@dataclass
class Row:
    """What is told of one fault; times are seconds."""

    id: str
    detected: float | None = None
    again: float | None = None
    lost: int | None = None
    seconds: float = 0.0
    state: str = ""
    cause: str = ""
    wrong: list[str] = field(default_factory=list)


class Case:
    """A run that something is done to, in a folder of its own."""

    def __init__(self, fault: Fault, place: Local, id: str, seed: int, folder: Path) -> None:
        self.fault, self.place, self.row, self.folder = fault, place, Row(id), folder
        rng = random.Random(f"{seed} {id}")
        rank = rng.randrange(RANKS)
        self.rank = rank if fault.rank is None else fault.rank
        # There is a checkpoint; and a limit is there before it is passed.
        self.step = STEPS if fault.mischief == "memory" else rng.randrange(EVERY + 1, STEPS)
        self.moment = rng.choice(MOMENTS), rng.uniform(0, 0.1)
        self.nproc = RANKS // fault.nodes
        self.node = self.rank // self.nproc
        self.held = contextlib.ExitStack()
        self.started: list[subprocess.Popen[bytes]] = []
        self.struck = 0.0

    last_step = STEPS

    # ------------------------------------------------------------ what faults use

    @property
    def submitter(self) -> subprocess.Popen[bytes]:
        return self.started[0]

    def start(self) -> subprocess.Popen[bytes]:
        words = ["submit", "job.yaml", "--cluster", "here", "--cluster-file", "clusters.yaml"]
        words += ["--detach"] if self.fault.long else []
        with (self.folder / "said").open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "clusterkit", *words, "--no-doctor"], cwd=self.folder,
                env=self.env, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            )  # fmt: skip

    @property
    def env(self) -> dict[str, str]:
        own = {"CLUSTERKIT_HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "tmp")}
        return {**os.environ, **self.place.env, **own}

    def clusterkit(self, *words: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "clusterkit", *words], cwd=self.folder, env=self.env,
            capture_output=True, timeout=SOON,
        )  # fmt: skip

    def runs(self) -> list[api.Run]:
        home = self.folder / "home" / "runs"
        names = sorted(os.listdir(home)) if home.exists() else []
        return [api.Run(RunFolder(home / name)) for name in names if not name.startswith(".")]

    @property
    def run(self) -> api.Run:
        return self.until(lambda: [run for run in self.runs() if run.plan], "run")[0]

    def until(self, look: Any, what: str, pause: float = 0.05) -> Any:
        deadline = time.monotonic() + SOON
        while True:
            with contextlib.suppress(OSError, ValueError, LookupError, ClusterkitError):
                if found := look():
                    return found
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} after {SOON:g} s")
            time.sleep(pause)

    def until_step(self, step: int, attempt: int = 1) -> None:
        for line in self.run.logs(node=0, follow=True):
            if line.attempt >= attempt and (line.event or {}).get("step", 0) >= step:
                return
        raise RuntimeError(f"it ended before step {step}: {self.run.status()}")

    def record(self, attempt: int, node: int, name: str) -> Path:
        return self.run.path / f"attempts/{attempt}/node-{node}/{name}"

    def rank_pid(self, rank: int, attempt: int = 1) -> int:
        """As the rank says it, so in its own pod or container."""

        def told() -> list[str]:
            lines = [line for line in self.run.logs(rank=rank) if line.attempt >= attempt]
            return [line.text for line in lines if line.text.startswith("ready ")]

        return int(self.until(told, "rank")[-1].split()[1])

    def agent_pid(self, node: int) -> int:
        path = self.record(1, node, "started.json")
        return int(self.until(lambda: json.loads(path.read_text())["pid"], "agent"))

    def supervisor_pid(self) -> int:
        path = self.run.path / "supervisor.json"
        return int(self.until(lambda: json.loads(path.read_text())["pid"], "supervisor"))

    def port(self) -> int:
        path = self.run.path / "facts.json"
        return int(self.until(lambda: json.loads(path.read_text())["port"], "port"))

    def sh(self, node: int, script: str) -> str:
        return self.place.sh(self.run, node, script)

    def signal(self, node: int, pid: int, signum: int) -> None:
        self.struck = time.time()
        self.sh(node, f"kill -{int(signum)} {pid}")

    def names(self) -> dict[str, str]:
        return {
            "container": container_name(self.run.id, self.node), "rank": str(self.rank),
            "pod": pod_name(self.run.id, self.node),
            "network": f"clusterkit-{self.run.id}_default", "node": str(self.node),
        }  # fmt: skip

    def attach(self) -> None:
        for run in self.runs():
            self.clusterkit("attach", run.id, "--detach")

    def go(self) -> None:
        """Let the run come to its last step."""
        for run in self.runs():
            with contextlib.suppress(RunFolderError):  # its submit was interrupted and removes it
                self.place.go(run, self.checkpoints_of(run))

    # ------------------------------------------------------------ the whole

    def carry_out(self, losses: dict[int, float]) -> Row:
        """Start it, break it, wait for its end, and judge that; whatever happens gives a row.

        Args:
            losses: of an undisturbed run, by step.
        """
        began = time.monotonic()
        try:
            with self.held:
                self._prepare()
                self._strike()
                self._judge(losses)
        except Exception as error:
            self.row.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            self._clear()
        self.row.seconds = time.monotonic() - began
        return self.row

    @property
    def own_checkpoints(self) -> bool:
        """Whether they lie in the folder of the case, where a disk can be full."""
        return self.place.name == "local" and self.fault.name != "twice"

    def checkpoints_of(self, run: api.Run) -> str:
        own = self.folder / "checkpoints"
        return str(own) if self.own_checkpoints else self.place.checkpoints(run)

    def _prepare(self) -> None:
        for name in ("home", "tmp", "checkpoints"):
            (self.folder / name).mkdir()
        names = {"disk": "home", "disk-attach": "home", "disk-rank": "home"}
        small = (names | {"disk-saving": "checkpoints"}).get(self.fault.name)
        if small:
            where = str(self.folder / small)
            words = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", where]
            subprocess.run(words, check=True)
            self.held.callback(subprocess.run, ["umount", "-l", where], check=True)
        (self.folder / "train.py").write_text(PROGRAM.read_text())
        mischief = f"{self.fault.mischief or 'none'}:{self.rank}:{self.step}"
        job = {
            "program": "train.py", "args": [str(STEPS), mischief], "nodes": self.fault.nodes,
            "gpus_per_node": self.nproc, "restarts": self.fault.restarts, "device": "cpu",
            "hang_timeout": self.fault.hang_timeout, "on_node_loss": self.fault.on_node_loss,
            "checkpoint": {
                "every": EVERY,
                "dir": str(self.folder / "checkpoints") if self.own_checkpoints else "checkpoints",
            },
        }  # fmt: skip
        (self.folder / "job.yaml").write_text(json.dumps(job))
        entry = self.place.entry | self.fault.entry(self.place)
        (self.folder / "clusters.yaml").write_text(json.dumps({"here": entry}))

    def _strike(self) -> None:
        self.started.append(self.start())
        if self.fault.early:
            what, seconds = self.moment
            home = self.folder / "home"
            self.until(lambda: not what or [*home.glob(what)], what, pause=0.002)
            time.sleep(seconds)
        elif self.fault.mischief:
            self.until_step(self.step - 1)
        else:
            self.until_step(self.step)
        self.struck = time.time()
        self.fault.do(self)
        if 1 not in self.fault.attempts:  # then it is not to be too late for this one
            again = self.run.path / "attempts" / "2"
            self.until(lambda: again.exists() or self.run.status().state.final, "end")
        elif self.fault.blames == "lost":
            self.until(lambda: self._said(self.run), self.fault.said)
        self.go()

    def _has_come_to_its_end(self) -> bool:
        """An early fault's run: it may have had no container when it was told to go on."""
        self.go()
        left = all(submitter.poll() is not None for submitter in self.started)
        return left and all(run.status().state.final for run in self.runs())

    def _judge(self, losses: dict[int, float]) -> None:
        fault, row = self.fault, self.row
        if fault.early:
            self.until(self._has_come_to_its_end, "end", pause=1)
        codes = [submitter.wait(SOON) for submitter in self.started]
        ends = [run.wait(SOON) for run in self.runs()]
        if not ends:
            if not fault.early:
                row.wrong.append("there is no run")
            row.state = "no run"
            return
        for run, end in zip(self.runs(), ends, strict=True):
            row.state = f"{end.state.value} {end.exit_code}, attempt {end.attempt}"
            if fault.early and end.failure and end.failure.cause == UNSTARTED:
                continue
            if end.state is not fault.state:
                row.wrong.append(f"it is {end.state}: {end.failure} {end.remark}")
            if end.attempt not in fault.attempts:
                row.wrong.append(f"attempt {end.attempt}")
            if min(codes) >= 0 and end.exit_code not in codes:
                row.wrong.append(f"submit left with {codes}")
            if fault.long:
                self._diagnosis(run, end)
                row.wrong += [f"left: {each}" for each in self.place.left(run)]
                continue
            self._measure(run, end)
            told = {step["step"]: step["loss"] for step in run.metrics()}
            # What was in the pipe of an agent that is gone, its log has not.
            all_told = fault.traced and end.state is State.SUCCEEDED
            all_told = all_told and fault.blames not in ("node", "lost")
            if losses and ((all_told and told != losses) or not told.items() <= losses.items()):
                row.wrong.append(f"losses: {told}, not {losses}")
            all_there = fault.traced and fault.blames != "lost"  # a lost pod takes its log along
            if all_there and end.state is State.SUCCEEDED and STEPS not in told:
                row.wrong.append("the last step was not told")
            self._diagnosis(run, end)
            row.wrong += [f"left: {each}" for each in self.place.left(run)]
        row.wrong += [f"left: {path.name}" for path in (self.folder / "tmp").iterdir()]

    def _diagnosis(self, run: api.Run, end: RunStatus) -> None:
        """Whether a failure on record names whoever was hit, and what for."""
        fault, names = self.fault, self.names()
        failures = [each.failure for each in end.attempts if each.failure]
        failures += [end.failure] if end.failure else []
        if failures:
            self.row.cause = failures[0].line
        wanted = {"node": (self.node, None), "rank": (self.node, self.rank)}.get(fault.blames)
        blames = fault.cause or wanted
        named = any(
            re.search(fault.cause.format(**names), each.cause)
            and wanted in (None, (each.node, each.rank))
            for each in failures
        )
        if blames and not named:
            self.row.wrong.append(f"diagnosis: {failures}, not {fault.blames} {wanted}")
        if not blames and failures and fault.attempts == (1,):
            self.row.wrong.append(f"diagnosis: {failures}")
        if fault.said and not self._said(run):
            self.row.wrong.append(f"nobody said {fault.said!r}")

    def _said(self, run: api.Run) -> bool:
        lines = [line.text for line in run.logs()] + [event.text for event in run.events()]
        wanted = self.fault.said.format(**self.names())
        return any(re.search(wanted, line) for line in lines)

    def _measure(self, run: api.Run, end: RunStatus) -> None:
        row, lines = self.row, list(run.logs())
        told = [(line.time, line.event) for line in lines if line.event]
        steps = [event["step"] for _, event in told if event["event"] == "metrics"]
        row.lost = len(steps) - len(set(steps))
        rounds = [at for at, event in told if event["event"] == "start"]
        later = [at for at, event in told if event["event"] == "metrics"
                 and any(self.struck < begun <= at for begun in rounds[1:])]  # fmt: skip
        row.again = later[0] - self.struck if later else None
        seen = [line.time for line in lines if line.rank is None]
        seen += [event.at for event in run.events()]
        seen += [end.finished_at] if end.finished_at and end.state is not State.SUCCEEDED else []
        for path in run.path.glob("attempts/*/node-*/exit.json"):
            ended = json.loads(path.read_bytes())
            seen += [ended["at"]] if ended["exit_code"] else []
        row.detected = min((at - self.struck for at in seen if at >= self.struck), default=None)

    def _clear(self) -> None:
        """Leave nothing, whatever was left."""
        for submitter in self.started:
            if submitter.poll() is None:
                submitter.kill()
                submitter.wait()
        for run in self.runs():
            with contextlib.suppress(Exception):
                run.cancel()
            agent.send(agent.processes_of(str(run.path)), signal.SIGKILL)
        with contextlib.suppress(Exception):
            self.place.repair()
