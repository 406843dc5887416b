"""``python -m tests.pictures``: the pictures of the docs, taken of real runs on this machine.

docs/top.svg is `clusterkit top` on a run of two nodes: a rank stops, the agents find who waits for
whom and start all again, a node is killed and comes back, and the run ends well. The picture is
taken while it hangs, and so is docs/web.png, `clusterkit web` in a browser: left as it is where
there is no browser. docs/failure.svg is what `clusterkit submit` says where a rank raises, and
docs/hang.svg an animated terminal in which a rank hangs; `python -m tests.pictures hang` makes this
one alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
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


HANGS = """
import time
import torch
import torch.distributed as dist

def next_batch(step):
    if rank == 3 and step == 60:
        time.sleep(1000)

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(1, 101):
    next_batch(step)
    dist.all_reduce(torch.ones(8))
    if rank == 0 and step % 20 == 0:
        print(f"step {step}  loss {2 + 6 / (1 + step / 12):.3f}", flush=True)
"""
COLUMNS, ROW, COLUMN = 92, 21, 8.4
"""Of the animated terminal: characters of a line, pixels of a line and of a character."""
LONGEST_PAUSE, LAST_PAUSE = 2.5, 7.0
"""Seconds that nothing is printed, as the animation has them, and before it begins again."""


def main(*only: str) -> None:
    with tempfile.TemporaryDirectory() as base:
        os.environ["CLUSTERKIT_HOME"] = base
        (DOCS / "hang.svg").write_text(_animated(*_recorded(Path(base))))
        if only == ("hang",):
            return
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


def _recorded(folder: Path) -> tuple[str, list[tuple[float, str]]]:
    """A submit in which a rank hangs: the command, and its lines with the seconds they came at."""
    (folder / "train.py").write_text(HANGS)
    (folder / "job.yaml").write_text(
        "name: gpt\nprogram: train.py\ngpus_per_node: 2\nhang_timeout: 10s\n"
    )
    command = "clusterkit submit job.yaml --nodes 2"
    argv = [str(Path(sys.executable).parent / "clusterkit"), *command.split()[1:]]
    began = time.monotonic()
    with subprocess.Popen(
        argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        return command, [(time.monotonic() - began, line.rstrip()) for line in process.stdout]


def _animated(command: str, lines: list[tuple[float, str]]) -> str:
    """A terminal as an SVG that a browser animates: its own styles, no script, no font."""
    shown = [(0.0, "p", "$ "), (1.0, "c", f"  {command}")]
    now, before = 1.6, 0.0
    for at, line in lines:
        now, before = now + min(at - before, LONGEST_PAUSE), at
        kind = "f" if re.match(r"(rank|node) .* failed first|hint: |n0 - hang: ", line) else "o"
        shown += [(now, kind, row) for row in textwrap.wrap(line, COLUMNS, subsequent_indent="  ")]
    whole = now + LAST_PAUSE
    rows, styles = [], []
    for number, (at, kind, text) in enumerate(shown):
        y = 44 + ROW * max(0, number - 1)  # the command stands in the prompt's line
        rows.append(
            f'<text class="{kind} l{number}" x="16" y="{y}" xml:space="preserve" '
            f'textLength="{len(text) * COLUMN:g}">{html.escape(text)}</text>'
        )
        share = 100 * at / whole
        styles.append(
            f"@keyframes k{number}{{0%,{share:.2f}%{{opacity:0}}"
            f"{share + 0.01:.2f}%,100%{{opacity:1}}}}"
            f".l{number}{{animation:k{number} {whole:.1f}s infinite}}"
        )
    width, height = 32 + COLUMNS * COLUMN, 60 + ROW * (len(shown) - 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" role="img" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">\n'
        "<title>clusterkit submit on two nodes: a rank hangs, and is named with its line</title>\n"
        "<style>text{fill:#d1d7e0}.p{fill:#3fb950}.f{fill:#ff7b72}"
        + "".join(styles[1:])
        + "@media(prefers-reduced-motion:reduce){text{animation:none!important}}</style>\n"
        f'<rect width="{width:g}" height="{height}" rx="8" fill="#0d1117"/>\n'
        + "".join(
            f'<circle cx="{x}" cy="16" r="5" fill="{color}"/>\n'
            for x, color in ((20, "#ff7b72"), (36, "#d29922"), (52, "#3fb950"))
        )
        + "\n".join(rows)
        + "\n</svg>\n"
    )


def _steps(run: api.Run) -> int:
    live = LiveRun(run._folder)
    live.poll()
    return live.reported.step


def _ended(status: RunStatus, run: api.Run) -> str:
    assert status.state is State.SUCCEEDED, status
    told = [f"attempt {event.attempt}: {event.text}" for event in run.events()]
    return "\n".join([f"{status.run} {status.state}, attempt {status.attempt}", *told])


if __name__ == "__main__":
    main(*sys.argv[1:])
