"""Copies of single files to and from the nodes of a run: `clusterkit cp`."""

from __future__ import annotations

import os
import posixpath
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from clusterkit.errors import BadInput, ClusterkitError, Unavailable
from clusterkit.lifecycle.inside import Command, Place
from clusterkit.run.folder import RunFolder

Progress = Callable[[int, int], object]
"""Takes how many bytes have been copied, and how many there are."""
_CHUNK = 1 << 18
_PATH = """\
import os, shutil, signal, sys
path = os.path.join(os.environ["CLUSTERKIT_RUN_DIR"], os.path.expanduser(sys.argv[1]))
"""
_GET = (
    _PATH
    + """\
try:
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        # Opening a pipe would wait.
        sys.exit(f"{path}: not a regular file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        print(size, os.fstat(file.fileno()).st_mode & 0o777, flush=True)
        while size > 0 and (data := file.read(min(size, 1 << 18))):
            sys.stdout.buffer.write(data)
            size -= len(data)
        if file.tell() == 0 and file.read(1):  # as in /proc
            sys.exit(f"{path}: its size is not known; clusterkit exec RUN -- cat {path}")
except OSError as error:
    sys.exit(f"{path}: {error.strerror}")
"""
)
_PUT = (
    _PATH
    + """\
name, size, mode, token = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
path = os.path.realpath(os.path.join(path, name) if os.path.isdir(path) else path)
folder, name = os.path.split(path)
draft = os.path.join(folder, f".{name}.{token}")
for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, lambda *_: sys.exit(1))
try:
    if os.path.exists(path) and not os.path.isfile(path):
        sys.exit(f"{path}: not a regular file")
    with open(draft, "xb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        if file.tell() != size:  # before fsync, during which no signal ends this
            sys.exit(f"{path}: it did not arrive whole")
        file.flush()
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), mode)
    os.replace(draft, path)
except OSError as error:
    sys.exit(f"{path}: {error.strerror}")
finally:
    if os.path.exists(draft):
        os.unlink(draft)
"""
)


def parse(source: str, dest: str) -> tuple[str, str | None, str | None]:
    """Return the run of ``RUN:PATH``, and its path as the source or as the goal; the other is None.

    Raises:
        BadInput: neither of the two is ``RUN:PATH``, or both are.
    """
    found = []
    for text in (source, dest):
        run, colon, path = text.partition(":")
        found.append((run, path) if colon and run and "/" not in run else None)
    there, goal = found
    if (there is None) == (goal is None):
        raise BadInput(
            f"{source} {dest}: exactly one of them must be RUN:PATH",
            hint="clusterkit cp last:checkpoints/final.pt .",
        )
    run, path = there or goal or ("", "")
    return run, path if there else None, path if goal else None


def download(
    folder: RunFolder, path: str, dest: Path, node: int | None, progress: Progress
) -> Path:
    """Copy a file of a node to this machine, whole or not at all; return its path here.

    Args:
        path: relative to the run's folder on the node.
        dest: a file, or a folder to put it into.

    Raises:
        BadInput: there is no such file.
        Unavailable: the node does not answer.
    """
    if not (name := posixpath.basename(path)):
        raise BadInput(f"no file is named in RUN:{path}", hint="cp copies single files")
    goal = Path(os.path.realpath(dest / name if dest.is_dir() else dest))
    if goal.exists() and not goal.is_file():
        raise BadInput(f"{goal}: not a regular file")
    draft = goal.with_name(f".{goal.name}.{secrets.token_hex(8)}")
    head, words, done, size, mode = bytearray(), bytearray(), 0, -1, 0o600
    try:
        with Place(folder, ended=True) as place, draft.open("xb") as file:

            def take(data: bytes, error: bool) -> None:
                nonlocal done, size, mode
                if error:
                    words.extend(data)
                    return
                if size < 0:
                    head.extend(data)
                    line, found, data = bytes(head).partition(b"\n")
                    if not found:
                        return
                    size, mode = map(int, line.split())
                file.write(data)
                done += len(data)
                progress(done, size)

            command, where = _started(place, node, [_GET, path])
            command.send(b"e")
            _check(command.run(take), words, where)
            if done != size:
                raise Unavailable(f"{where}: {path} changed while it was copied")
            os.fchmod(file.fileno(), mode)
        draft.replace(goal)
    except OSError as error:
        raise BadInput(f"{goal}: {error.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)
    return goal


def upload(
    folder: RunFolder, source: Path, path: str, node: int | None, progress: Progress
) -> None:
    """Copy a file of this machine to a node, whole or not at all. Raises as `download`."""
    words = bytearray()
    if source.exists() and not (source.is_file() or source.is_dir()):
        # Opening a pipe would wait.
        raise BadInput(f"{source}: not a regular file")
    try:
        with Place(folder, ended=True) as place, source.open("rb") as file:
            size, mode = os.fstat(file.fileno()).st_size, os.fstat(file.fileno()).st_mode & 0o777
            more = [source.name, str(size), str(mode), secrets.token_hex(8)]
            command, where = _started(place, node, [_PUT, path or ".", *more])

            def chunks() -> Iterator[bytes]:
                while data := file.read(_CHUNK):
                    yield data
                    progress(file.tell(), size)

            each = chunks()
            command.feed(lambda: next(each, b""))
            code = command.run(lambda data, error: words.extend(data))
            _check(code, words, where)
    except OSError as error:
        raise BadInput(f"{source}: {error.strerror}") from None


def _started(place: Place, node: int | None, argv: list[str]) -> tuple[Command, str]:
    number = place.node_of(node, None)
    way = place.ways([number])[number]
    return place.start(way, number, python=True, argv=["-c", *argv]), f"node {number}"


def _check(code: int, words: bytearray, where: str) -> None:
    if code:
        said = words.decode(errors="replace").strip().rpartition("\n")[2]
        error: type[ClusterkitError] = BadInput if code == 1 else Unavailable
        raise error(f"{where}: {said or f'the copy ended with {code}'}")
