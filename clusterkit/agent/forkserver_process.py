"""Start the process of a fork server: the job's own Python, which runs the text of some modules."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

MODULES = (
    "module_files", "influences", "static_look", "preload", "first_import", "rank", "program",
    "forkserver",
)  # fmt: skip
# Run first, in the interpreter of a job, by text that imports Python's own modules: the current
# folder and those of PYTHONPATH may have a json.py that is another, and a .pth file may have had
# such a one imported. Then all modules of Python's own names are hidden, as they may use it:
# ``hidden`` is ``sys.modules`` as it was, ``foreign`` the first such module; else both are empty.
# Kept is what is there before any .pth file is read, and distutils, which setuptools replaces.
OWN_MODULES_FIRST = """import os, sys
def own_modules_first():
    version = "/python%d.%d/" % sys.version_info[:2]
    platform = sys.base_exec_prefix + "/" + getattr(sys, "platlibdir", "lib") + version
    folders = os.path.dirname(os.__file__) + "/", platform
    def is_own(file):
        return file.startswith(folders) and "-packages" not in file
    sys.path[:] = sorted(filter(None, sys.path), key=lambda folder: not is_own(folder + "/"))
    names = getattr(sys, "stdlib_module_names", None)
    if names is None:  # Python 3.9
        lists = [os.listdir(each) for each in (folders[0], platform + "lib-dynload")
                 if os.path.isdir(each)]
        names = {each.partition(".")[0] for some in lists for each in some}
    kept = {"_bootlocale", "_collections_abc", "_frozen_importlib", "_frozen_importlib_external",
            "_sitebuiltins", "abc", "codecs", "distutils", "encodings", "genericpath", "io", "os",
            "posixpath", "site", "stat", "zipimport"}
    names = set(names).difference(sys.builtin_module_names, kept)
    before, foreign = dict(sys.modules), {}
    for name in names.intersection(before):
        spec = getattr(before[name], "__spec__", None)
        file = getattr(before[name], "__file__", None) or getattr(spec, "origin", None) or ""
        if not is_own(file) and file != "frozen":
            foreign[name] = "%s is %s" % (name, file or before[name])
    if not foreign:
        return {}, ""
    for name, module in before.items():
        file = getattr(module, "__file__", None) or ""
        top = name.partition(".")[0]
        if top in foreign or (top in names and is_own(file) and file.endswith(".py")):
            del sys.modules[name]
    return before, min(foreign.values())
hidden, foreign = own_modules_first()
"""
# Run by the server, as "<clusterkit>". The program's stack must hold its own frames alone, or what
# looks outwards differs: inspect.stack(), the stacklevel of warnings and logging. So the server
# runs in a hook that Python calls once all frames are gone, and whose own frame Python takes for
# one that has not begun, as it lacks that instruction (3.11 to 3.14; on others one frame is seen).
_MAIN = (
    f"""
import sys
config["modules"] = frozenset(sys.modules)
config["path"] = sys.path[sys.path[:1] == [""]:]  # each rank adds the program's own folder
{OWN_MODULES_FIRST}
config["hidden"], config["foreign"] = hidden, foreign"""
    + """
def main(*_):
    sys.excepthook = sys.__excepthook__
    for name in ("type", "value", "traceback", "exc"):
        vars(sys).pop("last_" + name, None)
    spaces = {}
    for name, text in config["texts"].items():
        spaces[name] = {"__name__": "clusterkit_" + name}
        exec(compile(text, f"<clusterkit {name}>", "exec", dont_inherit=True), spaces[name])
    program = spaces["forkserver"]["run"](config, spaces)
    error = None
    for step in range(2):  # find the program, and run it
        try:
            program.start(*program.arguments)
        except BaseException as raised:
            error = raised
            break
    program.end(error)

if (3, 11) <= sys.version_info < (3, 15):  # later ones: until they were looked at
    import opcode
    for name in sys.modules.keys() - config["modules"]:
        del sys.modules[name]  # the program did not import it
    code = bytearray(main.__code__.co_code)
    begins = code[::2].index(opcode.opmap["RESUME"])
    code[2 * begins] = opcode.opmap["NOP"]
    main.__code__ = main.__code__.replace(co_code=bytes(code))
sys.excepthook = main
raise Exception
"""
)
# What its command line holds; the handle is that of a file in memory.
_LOADER = (
    "exec(compile((lambda os: os.pread({0}, os.fstat({0}).st_size, 0))(__import__('os')),"
    "'<clusterkit>','exec'),{{'__name__':'clusterkit'}})"
)


class Target(NamedTuple):
    """What a fork server imports for."""

    python: Sequence[str]
    """The interpreter and its options."""
    program: Sequence[str]
    """The program, or ``-m`` and its module; arguments may follow."""
    env: Mapping[str, str]
    preload: Sequence[str] | None = None
    """What it imports; None: what cannot make a difference."""


def start(
    target: Target,
    channel: int,
    output: int,
    *,
    level: int = 0,
    preexec: Callable[[], None],
) -> subprocess.Popen[bytes]:
    """Start a fork server.

    Args:
        channel: the handle of the socket that it gets its orders from.
        output: a handle that takes what it prints.
        level: 1 to import nothing.
        preexec: called in the new process.

    Raises:
        OSError: the interpreter cannot be run.
    """
    source = os.memfd_create("clusterkit")
    try:
        text = _LOADER.format(source)
        config = {
            "texts": {name: module_text(name) for name in MODULES}, "argv": list(target.python),
            "program": list(target.program), "env": dict(target.env), "channel": channel,
            "source": source, "text": text,
            "preload": None if target.preload is None else list(target.preload),
        }  # fmt: skip
        os.write(source, f"config = {config!r}\n{_MAIN}".encode())
        return subprocess.Popen(
            [*target.python, "-c", text, str(level)], env=target.env, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, process_group=0, preexec_fn=preexec,
            pass_fds=(channel, source),
        )  # fmt: skip
    finally:
        os.close(source)


def module_text(name: str) -> str:
    """Return the source of a module of this package, which is a folder or in the archive."""
    spec: Any = __spec__
    data: bytes = spec.loader.get_data(os.path.join(os.path.dirname(__file__), f"{name}.py"))
    return data.decode()
