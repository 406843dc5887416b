"""A forked program does what it does under ``python program.py``: output, exit code, files."""

import bz2
import difflib
import gzip
import lzma
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import Case, at_start, servers

ADDRESS = re.compile(r"0x[0-9a-f]+|(?<=started )[0-9]+")


STATE = """
import gc, locale, os, resource, signal, sys, threading
import __main__
print(sys.argv, sys.orig_argv[1:], sys.path, sys.flags, sys.warnoptions, sys._xoptions)
print(vars(__main__).keys(), __file__, __name__, __spec__, __package__, __cached__, __doc__)
print(type(__loader__), __loader__.name, __loader__.path, __builtins__, __main__.__annotations__)
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.name)
    print(os.path.exists(f"/proc/self/fd/{stream.fileno()}"), stream.isatty())
print(locale.getlocale(), locale.setlocale(locale.LC_ALL, None), sys.getfilesystemencoding())
print({s: signal.getsignal(s) for s in signal.valid_signals()} == {
    **dict.fromkeys(signal.valid_signals(), signal.SIG_DFL), signal.SIGPIPE: signal.SIG_IGN,
    signal.SIGINT: signal.default_int_handler, signal.SIGXFSZ: signal.SIG_IGN,
    signal.SIGKILL: None, signal.SIGSTOP: None} or
    {s: str(signal.getsignal(s)) for s in signal.valid_signals()})
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), os.umask(0o22), gc.isenabled(),
      gc.get_threshold(), sys.getrecursionlimit(), sys.getswitchinterval())
print(resource.getrlimit(resource.RLIMIT_CORE), threading.current_thread(),
      threading.main_thread() is threading.current_thread(), threading.active_count())
print(threading.main_thread().native_id == os.getpid(), os.getcwd(), sys.excepthook, sys.gettrace())
print(open("/proc/self/cmdline", "rb").read().split(b"\\0")[1:], sys.executable, sys.stdin.read())
environ = open("/proc/self/environ", errors="surrogateescape").read().split("\\0")[:-1]
print(sorted(environ) == sorted(f"{name}={value}" for name, value in os.environ.items()))
print(sorted(os.environ), sorted(os.listdir("/proc/self/fd"))[:3], os.getpgid(0) == os.getpid())
"""
CHAIN = """
class Odd(Exception): pass
def inner():
    return 1 / 0
def outer():
    try:
        inner()
    except ZeroDivisionError as error:
        raise Odd("because") from error
try:
    outer()
except Odd:
    raise KeyError("while handling")
"""
ENDS = {
    "none": "raise SystemExit",
    "zero": "import sys; sys.exit(0)",
    "number": "import sys; print('x', end=''); sys.exit(7)",
    "text": "import sys; sys.exit('that is why')",
    "object": "import sys; sys.exit([1, 2])",
    "negative": "import sys; sys.exit(-1)",
    "more than a byte": "import sys; sys.exit(256 + 5)",
    # Without standard error: there 3.12 and 3.13 print an error of their own.
    "huge": "import os, sys; os.dup2(os.open(os.devnull, 1), 2); sys.exit(1 << 80)",
    "true": "import sys; sys.exit(True)",
    "quit": "quit(4)",
    "subclass": "class Stop(SystemExit): pass\nraise Stop(6)",
    "at once": "import os; print('lost'); os._exit(3)",
    "killed": "import os; print('kept', flush=True); os.kill(os.getpid(), 9)",
    "terminated": "import os; os.kill(os.getpid(), 15)",
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "interrupted": "import signal\ndef wait():\n    signal.raise_signal(signal.SIGINT)\nwait()",
    "interrupt caught": "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\n"
    "except KeyboardInterrupt: print('caught')",
    "base exception": "class Odd(BaseException): pass\nraise Odd('x', 1)",
    "group": "raise ExceptionGroup('two', [ValueError(1), TypeError('x')])",
    "note": "e = ValueError('x'); e.add_note('and more'); raise e",
    "no text": "raise AssertionError",
    "memory": "raise MemoryError",
    "handler": "import signal, sys, os\nsignal.signal(15, lambda *_: sys.exit(143))\n"
    "os.kill(os.getpid(), 15)\nwhile True: signal.pause()",
}
HOOKS = {
    "own": "import sys\nsys.excepthook = lambda t, v, b: print(t, v, b.tb_lineno, b.tb_next,"
    " sys.exc_info(), v.__traceback__ is b, sys.last_value is v)\nraise ValueError(1)",
    "raises": "import sys\ndef hook(*_):\n    raise KeyError('hook')\nsys.excepthook = hook\n1 / 0",
    "exits": "import sys\nsys.excepthook = lambda *_: sys.exit(11)\n1 / 0",
    "gone": "import sys\ndel sys.excepthook\n1 / 0",
}
THREADS = """
import atexit, sys, threading, time
done = threading.Event()
def late():
    done.wait()
    print("thread", threading.main_thread().is_alive())
    raise ValueError("in a thread")
threading.Thread(target=late, name="late").start()
threading.Thread(target=lambda: threading.Event().wait(), daemon=True).start()
threading.Thread(target=lambda: sys.exit(5)).start()
atexit.register(print, "atexit", threading.active_count())
threading._register_atexit(done.set)
print("main has ended")
"""
ATEXIT = """
import atexit, sys
@atexit.register
def first(): print("first")
@atexit.register
def second(): raise ValueError("second")
@atexit.register
def third(): print("third"); atexit.register(print, "registered late")
@atexit.register
def fourth(): sys.exit(9)
sys.stdout.write("no end of line")
sys.exit(4)
"""
FILES = """
import gzip, os, tempfile, weakref, zipfile
text = open("text", "w"); text.write("text" * 3000)
gone = tempfile.NamedTemporaryFile(dir="."); gone.write(b"gone" * 9)
stays = tempfile.NamedTemporaryFile(dir=".", delete=False); stays.write(b"stays" * 9)
stays.flush(); os.rename(stays.name, "stays")
binary = open("binary", "wb"); binary.write(b"binary" * 9)
packed = gzip.GzipFile("packed", "wb", mtime=0); packed.write(b"packed")
archive = zipfile.ZipFile("archive", "w"); archive.writestr(zipfile.ZipInfo("a"), "archive")
class Kept:
    def __init__(self): self.me, self.file = self, open("kept", "w")
    def __del__(self): print("freed", file=self.file); print("freed")
kept = Kept()
folder = tempfile.TemporaryDirectory(dir=".")
weakref.finalize(kept, print, "finalized")
def scope(): opened = open("scope", "w"); opened.write("s"); globals()["f"] = lambda: opened
scope()
"""
COMPRESSED = """
import bz2, gzip, io, lzma, os
given = open("given", "wb"); on_given = gzip.GzipFile("", "wb", mtime=0, fileobj=given)
on_given.write(b"given" * 99)
first = gzip.GzipFile("", "wb", mtime=0, fileobj=io.BufferedWriter(io.FileIO("raw", "wb")))
first.write(os.fsencode("raw" * 99))
large = gzip.GzipFile("large", "wb", mtime=0); large.write(bytes(range(256)) * 2000)
lines = io.TextIOWrapper(gzip.GzipFile("lines", "wb", mtime=0)); lines.write("line\\n" * 9)
bz, xz = bz2.BZ2File("bz", "wb"), lzma.LZMAFile("xz", "wb")
bz.write(b"bz" * 9); xz.write(b"xz" * 9)
"""
MULTI = """
import multiprocessing, os, sys
class Thing:
    def __init__(self, value): self.value = value
    def __repr__(self): return f"Thing({self.value})"
def work(thing):
    print("in", multiprocessing.current_process().name, __name__, flush=True)
    return Thing(thing.value + 1)
print("top", __name__, flush=True)
if __name__ == "__main__":
    for how in sys.argv[1:]:
        context = multiprocessing.get_context(how)
        with context.Pool(1) as pool:
            print(how, pool.map(work, [Thing(1)]), flush=True)
        process = context.Process(target=sys.exit, args=(3,))
        process.start(); process.join(); print(process.exitcode, flush=True)
    with multiprocessing.Manager() as manager: print(manager.list([1]))
"""
FORKS = """
import os, sys
sys.stdout.write("once ")
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    print("child"); sys.exit(3)
print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
import subprocess
print(subprocess.run([sys.executable, "-c", "import os; print(os.environ['RANK'])"],
      capture_output=True).stdout, subprocess.run("exit 4", shell=True).returncode)
os.execv(sys.executable, [sys.executable, "-c", "print('exec'); raise SystemExit(8)"])
"""
FRAMES = """
import inspect, logging, sys, traceback, warnings
def inner():
    print([frame[1:4] for frame in inspect.stack()], sys.exc_info(), hasattr(sys, "last_value"))
    traceback.print_stack()
    warnings.warn("outermost", stacklevel=3)
    logging.basicConfig(format="%(filename)s:%(lineno)d %(funcName)s")
    logging.warning("", stacklevel=9, stack_info=True)
inner()
print(sys._getframe().f_back is None, [name for name in sys.modules if "opcode" in name])
try:
    sys._getframe(9)
except ValueError as error:
    print(error)
"""
PACKAGE = {
    "pack/__init__.py": "print('package', __name__, __path__ != [])",
    "pack/__main__.py": "from . import sub\nfrom .sub import f\nimport sys\n"
    "print(__name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0])\n"
    "import __main__; print(sorted(vars(__main__)))\nf()",
    "pack/sub.py": "def f(): raise ValueError('sub')",
}
OWN = {
    f"{name}.py": "mine = True"
    for name in (
        "array", "ast", "ctypes", "fcntl", "json", "opcode", "random", "select", "selectors",
        "shutil", "signal", "socket", "struct", "subprocess", "sysconfig",
    )
}  # fmt: skip
"""Modules of the program that are named as those that the server uses."""
SHOWS_OWN = f"""
for name in {[name[:-3] for name in OWN]}:
    print(name, getattr(__import__(name), "mine", None))
"""
TAKEN = (
    "ast", "collections", "contextlib", "ctypes", "functools", "importlib", "inspect", "json",
    "linecache", "opcode", "queue", "random", "re", "selectors", "socket", "struct",
    "threading", "tokenize", "traceback", "types", "typing", "warnings",
)  # fmt: skip
"""Names of Python's own that a module has which was imported as Python started."""
SHOWS_TAKEN = f"""
import sys
print(sorted(sys.modules.keys() - {{"linecache"}}))  # of -c, in 3.13
for name in {[*TAKEN, "subprocess", "tempfile", "logging", "dataclasses", "argparse"]}:
    try:
        module = __import__(name)
        print(name, getattr(module, "mine", None), module.__file__ == sys.modules[name].__file__)
    except Exception as error:
        print(name, type(error), error)
print(sorted(sys.modules.keys() - {{"linecache"}}))  # of -c, in 3.13
if not hasattr(sys.modules["threading"], "mine"):
    sys.modules["threading"].Timer(0.1, print, ("timer",)).start()
raise ValueError("at the end")
"""


def taken(*names: str, argv: tuple[str, ...] = ("program.py",)) -> Case:
    """A program whose Python has imported modules of these names as it started."""
    env = {"PYTHONPATH": "site", "CASE": " ".join((*names, *argv))}
    return Case(SHOWS_TAKEN, argv=argv, files=at_start(*names), env=env)


PROGRAMS = {
    "state": Case(STATE, argv=("./../folder/program.py", "a b", "", "ü\udce9", "-x")),
    "state, no path of its own": Case(STATE, env={"PYTHONSAFEPATH": "1"}),
    "state, development mode": Case(STATE, python=("-X", "dev", "-u")),
    "state, optimized": Case(STATE + "assert False", python=("-OO", "-B")),
    "state, isolated": Case(STATE, python=("-I",)),
    "state, no environment, no site": Case(STATE, python=("-ES",)),
    "state, other places": Case(STATE, env={"LC_ALL": "C", "PYTHONPATH": "/x:y", "TZ": "Asia/Tokyo"}),  # noqa: E501
    "chain": Case(CHAIN),
    "syntax error": Case("x = 1\nif x\n    y\n"),
    "syntax error, indentation": Case("def f():\nreturn 1\n"),
    "syntax error, unclosed": Case("f(1,\n"),
    "missing": Case(argv=("nowhere.py",)),
    "missing module": Case(argv=("-m", "nowhere.at.all")),
    "latin-1": Case(files={"program.py": "# coding: latin-1\nprint('\xe9')".encode("latin-1")}),
    "byte order mark": Case(files={"program.py": "\ufeffprint('x')\r\nprint('y')\r\n"}),
    "module": Case("print(__name__, __spec__.name); 1 / 0", argv=("-m", "program", "a")),
    "package": Case(argv=("-m", "pack", "-m", "x"), files=PACKAGE),
    "submodule": Case(argv=("-m", "pack.sub"), files=PACKAGE),
    "folder": Case(argv=("pack", "x"), files={"pack/__main__.py": STATE, "pack/a.py": ""}),
    "empty folder": Case(argv=("pack",), files={"pack/a.py": ""}),
    "zip": Case(argv=("a.zip", "x"), files={"a.zip": "import sys; print(sys.path[0]); 1/0"}),
    **{f"end: {name}": Case(text) for name, text in ENDS.items()},
    **{f"hook: {name}": Case(text) for name, text in HOOKS.items()},
    "threads": Case(THREADS),
    "atexit": Case(ATEXIT),
    "files": Case(FILES),
    "multiprocessing": Case(MULTI, argv=("program.py", "fork", "spawn", "forkserver")),
    "multiprocessing, module": Case(MULTI, argv=("-m", "program", "spawn")),
    "forks": Case(FORKS),
    "pickle": Case(
        "import pickle, copy\nclass A: pass\nclass B(A): x = 1\n"
        "print(pickle.loads(pickle.dumps(B)), B.__module__, type(copy.deepcopy(B())))\n"
        "import __main__; print(__main__.B is B)"
    ),
    "modules named as Python's": Case(
        "import json, socket, select, runpy, hashlib\nprint(json.x, socket.x, select.x, hashlib.x)",
        files={f"{name}.py": "x = 'own'" for name in ["json", "socket", "select", "hashlib"]},
    ),
    # A variable of its own: the server starts in the program's folder.
    "modules named as the server's": Case(SHOWS_OWN, files=OWN, env={"CASE": "beside"}),
    "modules named as the server's, in PYTHONPATH": Case(
        # But those that a .pth file may have Python import as it starts.
        SHOWS_OWN, files={
            f"lib/{name}": text for name, text in OWN.items()
            if name not in ("random.py", "shutil.py", "struct.py")
        },
        env={"PYTHONPATH": "lib"},
    ),
    "modules named as the server's, in a folder that is run": Case(
        argv=("app",), env={"CASE": "folder"},
        files={f"app/{n}": text for n, text in {**OWN, "__main__.py": SHOWS_OWN}.items()},
    ),
    **{f"module named {name} imported at the start": taken(name) for name in TAKEN},
    "modules named as Python's imported at the start": taken("json", "socket", "types", "struct"),
    "module imported at the start, -m": taken("selectors", argv=("-m", "program")),
    "warnings": Case(
        "import warnings\nwarnings.warn('user')\nwarnings.warn('old', DeprecationWarning)\n"
        "def f(): warnings.warn('up', stacklevel=2)\nf()\nprint(warnings.filters)"
    ),
    "warnings are errors": Case("import warnings\nwarnings.warn('x')", python=("-W", "error")),
    "bytes": Case("str(b'x')", python=("-bb",)),
    "recursion": Case("def f(): f()\ntry: f()\nexcept RecursionError as e: print(e)"),
    "logging": Case(
        "import logging\nlogging.basicConfig()\nlogging.warning('w')\ntry: 1 / 0\n"
        "except ZeroDivisionError: logging.exception('e')"
    ),
    "broken pipe": Case(
        "import os, sys\nr, w = os.pipe(); os.close(r)\ntry: os.write(w, b'x')\n"
        "except BrokenPipeError as e: print(e)\nos.dup2(w, 1); print('lost')"
    ),
    "standard output closed": Case("import sys\nprint('x'); sys.stdout.close()"),
    "standard output closed below": Case("import os\nprint('x'); os.close(1)"),
    "standard output replaced": Case("import io, sys\nsys.stdout = io.StringIO(); print('x')"),
    "no standard error": Case("import sys\nsys.stderr = None; 1 / 0"),
    "text to no standard error": Case("import sys\nsys.stderr = None; sys.exit('x')"),
    "hash": Case("print(hash('x'), {'a', 'b', 'c'})", env={"PYTHONHASHSEED": "5"}),
    "fault handler": Case(
        "import faulthandler; print(faulthandler.is_enabled())", env={"PYTHONFAULTHANDLER": "1"}
    ),
    "source": Case(
        "import inspect, linecache\ndef f():\n    return 1\nprint(inspect.getsource(f))\n"
        "print(linecache.getline(__file__, 1))"
    ),
    "frames": Case(FRAMES),
    "frames, module": Case(FRAMES, argv=("-m", "program")),
    "frames, traced": Case(
        "import sys\nsys.settrace(lambda f, e, a: print(e, f.f_code.co_name, f.f_back))\n"
        "def f(): return 1\nf()\nsys.settrace(None)\nsys.setprofile(print)\nsys.setprofile(None)"
    ),
    "asyncio": Case(
        "import asyncio\nasync def f():\n    await asyncio.sleep(0); raise ValueError(1)\n"
        "asyncio.run(f())"
    ),
    "futures": Case(
        "from concurrent.futures import ThreadPoolExecutor\nimport time\n"
        "pool = ThreadPoolExecutor(1)\npool.submit(lambda: print('pooled'))"
    ),
}  # fmt: skip


def contents(folder):
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {
        str(path.relative_to(folder)): data for path, data in files.items() if path.suffix != ".pyc"
    }


@pytest.fixture(
    scope="module",
    params=[
        "",
        *(pytest.param(f"3.{n}", marks=pytest.mark.thorough) for n in (9, 10, 11, 12, 13, 14)),
    ],
)
def forked(request, tmp_path_factory):
    with servers(tmp_path_factory, python=interpreter(request.param)) as found:
        yield found


def interpreter(version):
    """The path of a Python of this version, "": of this one."""
    if not version:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    found = [*pyenv.glob(f"versions/{version}.*/bin/python")]
    path = shutil.which(f"python{version}") if not found else str(found[0])
    done = path and subprocess.run([path, "-c", ""], check=False)
    if not done or done.returncode:
        pytest.skip(f"no Python {version}")
    return path


@pytest.mark.parametrize("name", PROGRAMS)
def test_forked_program_behaves_as_under_python(name, forked, tmp_path, monkeypatch, request):
    if name.startswith("frames") and {"3.9", "3.10"} & {*request.node.callspec.params.values()}:
        pytest.skip("one frame of ours is seen before Python 3.11")
    version = request.node.callspec.params["forked"] or "{}.{}".format(*sys.version_info)
    if "named linecache" in name and version in ("3.13", "3.14"):
        pytest.skip("python -c calls linecache itself from 3.13 on")
    case = PROGRAMS[name]
    for variable, value in case.env.items():
        monkeypatch.setenv(variable, value)
    folder, found = tmp_path / "folder", []
    for run in (forked.run_alone, lambda case: forked.run(case)[0]):
        case.lay_out(folder)
        monkeypatch.chdir(folder)
        output, code = run(case)
        text = ADDRESS.sub("N", output.decode(errors="replace"))
        found.append((code, text.splitlines(), contents(folder)))
        monkeypatch.chdir(tmp_path)
        folder.rename(tmp_path / f"folder-{len(found)}")
    differs = "\n".join(difflib.unified_diff(found[0][1], found[1][1], "python", "forked", n=0))
    assert found[1] == found[0], differs


def test_forked_program_flushes_open_compressed_files(forked, tmp_path, monkeypatch):
    # Python 3.12 and 3.13 lose the first, as they close the file below it before.
    case = Case(COMPRESSED)
    case.lay_out(tmp_path / "folder")
    monkeypatch.chdir(tmp_path / "folder")
    assert forked.run(case) == [(b"", 0)]
    assert gzip.decompress(Path("given").read_bytes()) == b"given" * 99
    assert gzip.decompress(Path("raw").read_bytes()) == b"raw" * 99
    assert gzip.decompress(Path("large").read_bytes()) == bytes(range(256)) * 2000
    assert gzip.decompress(Path("lines").read_bytes()) == b"line\n" * 9
    assert bz2.decompress(Path("bz").read_bytes()) == b"bz" * 9
    assert lzma.decompress(Path("xz").read_bytes()) == b"xz" * 9
