"""A training program that needs no framework, and names none, so that none is preloaded:
ranks that step together, checkpoints, a loss to the last bit.

    program.py STEPS MISCHIEF

Rank 0 listens at MASTER_PORT and adds up what all ranks send, once a step. So a rank that is lost
is to the others an error of their connection, as under gloo. Before the last step all wait for a
file ``go`` beside the checkpoints: whoever has something in mind for this run is in time for it.
A rank that finds itself alive in an earlier attempt leaves with 1: the run then takes one too many.
MISCHIEF, as ``exception:RANK:STEP``, is what a rank of the first attempt does; ``none``: nothing.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import IO, Any

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PLACE = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
FOLDER = Path(os.environ["CLUSTERKIT_CHECKPOINT_DIR"])
STEP_SECONDS = 0.02
KEPT: list[object] = []


def say(event: str, **fields: object) -> None:
    print("@clusterkit " + json.dumps({"event": event, **fields}), flush=True)


def meet() -> list[IO[Any]]:
    """Rank 0's connections to the others, in their order; the others' one to rank 0."""
    if RANK == 0:
        server = socket.create_server(("", PLACE[1]))
        KEPT.append(server)  # as a store listens to the end
        files = [server.accept()[0].makefile("rw") for _ in range(WORLD - 1)]
        return sorted(files, key=receive)
    deadline = time.monotonic() + 60
    while True:
        try:
            file = socket.create_connection(PLACE).makefile("rw")
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    send(file, RANK)
    return [file]


def send(file: IO[Any], value: Any) -> None:
    file.write(json.dumps(value) + "\n")
    file.flush()


def receive(file: IO[Any]) -> Any:
    if not (line := file.readline()):
        raise ConnectionError("Connection closed by peer")
    return json.loads(line)


def summed(files: list[IO[Any]], value: Any) -> Any:
    """The sum of what all ranks give, added up in their order."""
    if RANK:
        send(files[0], value)
        return receive(files[0])
    total = sum([value, *map(receive, files)])
    for file in files:
        send(file, total)
    return total


def save(step: int, weight: float) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = json.dumps([step, weight])
    draft = FOLDER / "draft"
    draft.write_text(f"{zlib.crc32(text.encode())} {text}")
    draft.replace(FOLDER / f"step-{step:08}")


def load() -> tuple[int, float]:
    """The newest whole checkpoint."""
    for path in sorted(FOLDER.glob("step-*"), reverse=True):
        sum_, _, text = path.read_text().partition(" ")
        if sum_ == str(zlib.crc32(text.encode())):
            step, weight = json.loads(text)
            say("resumed", step=step)
            return step, weight
        print(f"skipped {path.name}: it is torn", flush=True)
    return 0, 0.0


def alone() -> None:
    """End where this rank of an earlier attempt lives: two would write the same checkpoints."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    lock = (FOLDER.parent / f"rank-{RANK}").open("w")
    KEPT.append(lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"rank {RANK} of an earlier attempt lives")


def misbehave(how: str) -> None:
    if how == "exception":
        raise ValueError("injected, as told")
    if how == "exit":
        print("about to leave", flush=True)
        sys.exit(7)
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how in (
        "hang",
        "deaf",
    ):  # a deadlock: the agent reads the stack of a rank that waits for a lock
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if how == "memory":
        KEPT.extend(b"x" * (8 << 20) for _ in range(64))


def main() -> None:
    steps, (how, rank, at) = int(sys.argv[1]), (*sys.argv[2].split(":"), "-1", "-1")[:3]
    alone()
    print("ready", os.getpid(), flush=True)
    files = meet()
    first, weight = summed(files, 0), 0.0
    if RANK == 0:
        first, weight = load()
    first, weight = summed(files, first), summed(files, weight)
    if RANK == 0:
        say("start", first_step=first)
    for step in range(first + 1, steps + 1):
        if step == steps:
            while RANK == 0 and not (FOLDER.parent / "go").exists():
                time.sleep(0.01)
            summed(files, 0)  # what the others add to the step they send after that
        if (RANK, step, os.environ["CLUSTERKIT_ATTEMPT"]) == (int(rank), int(at), "1"):
            misbehave(how)
        error = weight - math.sin(step * 1.7 + RANK)
        weight -= 0.1 * summed(files, error) / WORLD
        if RANK == 0:
            say("metrics", step=step, loss=error * error + weight)
            if step % int(os.environ["CLUSTERKIT_CHECKPOINT_EVERY"]) == 0:
                save(step, weight)
        time.sleep(STEP_SECONDS)


main()
