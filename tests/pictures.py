"""``python -m tests.pictures``: the pictures of the docs, taken of real runs on this machine.

docs/top.svg is `clusterkit top` on a run of two nodes: a rank stops, the agents find who waits for
whom and start all again, a node is killed and comes back, and the run ends well. The picture is
taken while it hangs, and so is docs/web.png, `clusterkit web` in a browser: left as it is where
there is no browser. docs/failure.svg is what `clusterkit submit` says where a rank raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from clusterkit import api
from clusterkit.lifecycle.live import LiveRun
from clusterkit.run.status import RunStatus, State
from clusterkit.ui.top.app import Top
from clusterkit.ui.top.board import RunBoard
from tests import browser

SIZE = (110, 34)
PIXELS = (1000, 640)
DOCS = Path(__file__).resolve().parents[1] / "docs"
PROGRAM = """
import json, os, time
import torch
import torch.distributed as dist

def wait_for_a_file():
    time.sleep(1000)

dist.init_process_group("gloo")
rank, again = dist.get_rank(), int(os.environ["CLUSTERKIT_ATTEMPT"]) > 1
if rank == 0:
    print("@clusterkit " + json.dumps({"event": "start", "steps": 150}), flush=True)
for step in range(1, 151):
    begun = time.monotonic()
    time.sleep(0.05)
    if rank == 3 and step == 60 and not again:
        wait_for_a_file()
    dist.all_reduce(torch.ones(8))
    spent = time.monotonic() - begun
    if rank == 0:
        told = {"step": step, "loss": 2 + 6 / (1 + step / 12) + 0.1 * (step * 7 % 5 - 2),
                "tokens_per_second": 4096 / spent, "step_seconds": spent}
        print("@clusterkit " + json.dumps({"event": "metrics", **told}), flush=True)
    elif step % 10 == 1:
        print(f"batch {step} of shard {rank}", flush=True)
dist.destroy_process_group()
"""
BROKEN = """
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    learning_rate = float("1e-3 # peak")
dist.barrier()
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as base:
        os.environ["CLUSTERKIT_HOME"] = base
        (DOCS / "failure.svg").write_text(_failure(Path(base)))
        program = Path(base) / "demo" / "train.py"
        program.parent.mkdir()
        program.write_text(PROGRAM)
        job = program.with_name("gpt.yaml")
        job.write_text(
            f"name: gpt\nprogram: {program}\nnodes: 2\ngpus_per_node: 2\nrestarts: 2\n"
            "hang_timeout: 20s\n"
        )
        run = api.submit(job, run_id="gpt-1123-demo")
        try:
            with _page(run, Path(base) / "profile") as page:
                (DOCS / "top.svg").write_text(asyncio.run(_hanging(run)))
                if page:
                    page.until("document.querySelector('#summary [role=alert]') !== null")
                    page.picture(DOCS / "web.png")
            run.wait(120, until=lambda status: status.attempt == 2 and _steps(run) > 70)
            started = run.path / "attempts" / "2" / "node-1" / "started.json"
            os.kill(msgspec.json.decode(started.read_bytes())["pid"], signal.SIGKILL)
            print(_ended(run.wait(240), run))
        finally:
            run.cancel()


async def _hanging(run: api.Run) -> str:
    """A picture of the run's board, some seconds after its agents have said who waits."""
    board = RunBoard(run._folder)
    app = Top(board)
    async with app.run_test(size=SIZE) as pilot:
        end = time.monotonic() + 120
        while "hang: " not in str(app.surface._lines) and time.monotonic() < end:
            await pilot.pause(0.2)
        await pilot.press("down", "down", "down")
        await pilot.pause(1.0)
        app.poll()
        await pilot.pause()
        svg = app.export_screenshot(title=f"clusterkit top {run.id}")
    return _own_fonts(svg)


@contextlib.contextmanager
def _page(run: api.Run, profile: Path) -> Iterator[browser.Page | None]:
    """The run's page in a browser, if there is one."""
    if browser.found() is None:
        print("docs/web.png: skipped, there is no browser (apt-get install chromium)")
        yield None
        return
    with api.web([run]) as server, browser.browser(profile) as page:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            page.size(*PIXELS)
            page.open(server.url)
            yield page
        finally:
            server.shutdown()


def _own_fonts(svg: str) -> str:
    """The picture without the fonts that a browser would fetch for it."""
    return re.sub(r"@font-face \{[^}]*\}\s*", "", svg)


def _failure(folder: Path) -> str:
    """A picture of a terminal in which a submit has failed."""
    (folder / "broken.py").write_text(BROKEN)
    words = ["clusterkit", "submit", "--nodes", "2", "--", "python", "broken.py"]
    ours, theirs = os.openpty()
    command = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    env = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color"}
    with (
        open(ours, "rb") as terminal,
        subprocess.Popen(command, cwd=folder, stdout=theirs, stderr=theirs, env=env),
    ):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while data := terminal.read1():
                shown += data
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold green]$[/] {' '.join(words)}", highlight=False)
    lines = [line.rpartition("\r")[2] for line in shown.decode().replace("\r\n", "\n").split("\n")]
    # The terminal has taken the progress bar away.
    console.print(Text.from_ansi("\n".join(x for x in lines if x.strip() and "━" not in x)))
    return _own_fonts(console.export_svg(title="a rank raises"))


def _steps(run: api.Run) -> int:
    live = LiveRun(run._folder)
    live.poll()
    return live.reported.step


def _ended(status: RunStatus, run: api.Run) -> str:
    assert status.state is State.SUCCEEDED, status
    told = [f"attempt {event.attempt}: {event.text}" for event in run.events()]
    return "\n".join([f"{status.run} {status.state}, attempt {status.attempt}", *told])


if __name__ == "__main__":
    sys.exit(main())
