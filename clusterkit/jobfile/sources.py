"""Follow the imports of a program through its own files; nothing is run or imported."""

from __future__ import annotations

import ast
import functools
import os
import posixpath
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from clusterkit.files import source_of
from clusterkit.spec import JobSpec

Read = Callable[[str], str | None]
"""Returns a file's text, or None if there is none."""
MOST_FILES = 300
_CONSTANT = "--local_rank", "--local-rank"


def read_source(path: str) -> str | None:
    """Return a file's text, or None."""
    return source_of(Path(path)) if os.path.isfile(path) else None


def starts(
    program: str | None, module: str | None, folder: str = ""
) -> tuple[list[str], list[str]]:
    """Return the files that may run first, and the folders in which Python looks for modules.

    Args:
        folder: the one in which the ranks start.
    """
    if program is not None:
        path = posixpath.join(folder, program)
        return [path], [posixpath.dirname(path)]
    if module is None:
        return [], []
    files = _files(folder, module.split("."))
    return [*files, posixpath.join(folder, *module.split("."), "__main__.py")], [folder]


def starts_of(job: JobSpec) -> tuple[list[str], list[str]]:
    """Return `starts` of a job on this machine, with the folders of PYTHONPATH."""
    folder, program = job.workdir or ".", job.program
    if program is not None and os.path.isdir(os.path.join(folder, program)):
        program = os.path.join(program, "__main__.py")
    files, roots = starts(program, job.module, folder)
    path = ":".join(env.get("PYTHONPATH", "") for env in (job.env, os.environ))
    return files, [*roots, *(os.path.join(folder, each) for each in path.split(":") if each)]


def imported(
    files: Sequence[str], roots: Sequence[str], read: Read = read_source
) -> Iterator[tuple[str, str]]:
    """Yield path and text of files and of what they import from ``roots``, `MOST_FILES` at most.

    Imports that only happen under a condition count as well.
    """
    for path, text, queue in _reached(files, read):
        yield path, text
        for level, names in imports(text):
            folder = posixpath.dirname(path)
            for _ in range(level - 1):
                folder = posixpath.dirname(folder)
            for root in [folder] if level else roots:
                queue += _files(root, names)


def _reached(files: Sequence[str], read: Read) -> Iterator[tuple[str, str, list[str]]]:
    """Yield path and text of files, each once, and a list to which to add more of them."""
    queue, seen = list(files), set[str]()
    while queue and len(seen) < MOST_FILES:
        path = queue.pop(0)
        if path not in seen and (text := read(path)) is not None:
            seen.add(path)
            yield path, text, queue


def local_rank_argument(given: str, texts: Sequence[str]) -> str:
    """Return the spelling of a launcher's argument, such as ``--local_rank``, for a program.

    torch's launcher passes ``--local-rank`` since 2.0 and passed ``--local_rank`` before; argparse
    takes neither for the other.

    Args:
        given: the launcher's spelling.
        texts: of the program's files.
    """
    known = {name for text in texts for name in _CONSTANT if name in _strings(text)}
    known = known or {name for text in texts for name in _CONSTANT if name in text}
    return known.pop() if len(known) == 1 else given


def always_imports(
    name: str, files: Sequence[str], roots: Sequence[str], read: Read = read_source
) -> bool:
    """Return whether a program certainly imports a package: unconditionally, where it begins.

    Imports under ``if``, in ``try`` and in functions do not count.
    """
    for _, text, queue in _reached(files, read):
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                level = getattr(node, "level", 0)
                for _, names in imports(ast.unparse(node)) if not level else ():
                    own = [file for root in roots for file in _files(root, names)]
                    if names[0] == name and not any(read(file) is not None for file in own):
                        return True
                    queue += own
            elif isinstance(node, ast.Expr | ast.If) and "exit" in ast.dump(node):
                break  # it may end here
    return False


def _files(root: str, names: Sequence[str]) -> list[str]:
    """Return the files that importing ``a.b.c`` may run."""
    paths = [posixpath.join(root, *names[: end + 1]) for end in range(len(names))]
    return [file for path in paths for file in (f"{path}/__init__.py", f"{path}.py")]


def _parsed(text: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return []  # running the program will report it


@functools.cache
def imports(text: str) -> list[tuple[int, list[str]]]:
    """Return level and dotted name of each import; a name may be an attribute of the last one."""
    found = []
    for node in _parsed(text):
        if isinstance(node, ast.Import):
            found += [(0, alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            found += [(node.level, [*base, alias.name]) for alias in node.names]
    return found


def _strings(text: str) -> set[str]:
    nodes = _parsed(text)
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
