# ruff: noqa: SIM115 - left open on purpose
"""A way to end for each rank, all of them with 0; what the files then hold is checked as well."""

import atexit
import gzip
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
import zipfile

ENDS = []
FOLDER = os.path.join(os.getcwd(), f"rank-{os.environ['RANK']}")
os.mkdir(FOLDER)
os.chdir(FOLDER)


def end(function):
    ENDS.append(function)
    return function


@end
def returns():
    sys.stdout.write("no end of line")


@end
def exits_with_none():
    raise SystemExit


@end
def exits_with_zero():
    atexit.register(print, "registered")
    sys.exit(0)


@end
def exits_at_once():
    atexit.register(print, "never")
    print("kept", flush=True)
    os._exit(0)


@end
def threads_go_on():
    def late():
        started.wait()
        print("a thread, after the main one")

    started = threading.Event()
    threading.Thread(target=late).start()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    threading._register_atexit(started.set)
    print("main has ended")


@end
def handlers_fail():
    @atexit.register
    def fails():
        raise ValueError("in a handler")

    atexit.register(lambda: atexit.register(print, "registered late"))


@end
def files_left_open():
    global text, binary, packed, archive
    text = open("text", "w")
    text.write("text" * 5000)
    binary = open("binary", "wb")
    binary.write(b"binary")
    packed = gzip.GzipFile("packed", "wb", mtime=0)
    packed.write(b"packed" * 999)
    archive = zipfile.ZipFile("archive", "w")
    archive.writestr(zipfile.ZipInfo("a"), "archive")


@end
def finalizers():
    class Kept:
        def __del__(self):
            print("freed")

    globals()["kept"] = kept = Kept()
    weakref.finalize(kept, print, "finalized")


@end
def output_closed():
    print("closed")
    sys.stdout.close()


@end
def output_replaced():
    sys.stdout = io.StringIO()
    print("lost")


@end
def output_redirected():
    print("first", flush=True)
    os.dup2(os.open("output", os.O_CREAT | os.O_WRONLY), 1)
    print("into a file")


@end
def children_fail():
    if (pid := os.fork()) == 0:
        print("child", flush=True)
        sys.exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(subprocess.run("exit 4", shell=True).returncode)


@end
def replaced():
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-c", "import os; print('exec', os.getcwd()[-4:])"])


@end
def handled_signal():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)


@end
def logs():
    logging.basicConfig(filename="log", format="%(levelname)s %(message)s")
    logging.warning("in a file")
    logging.getLogger().handlers[0].stream.write("held back")
    logging.raiseExceptions = False


@end
def unicode():
    print("naïve 日本語 🚀 \udce9".encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
    sys.stdout.buffer.write(b"bytes \xff\n")


@end
def caught_everything():
    try:
        raise KeyboardInterrupt
    except BaseException as error:
        print(type(error), sys.exc_info()[0])
    sys.stderr.write("to standard error, without an end of line")


@end
def many_lines():
    for number in range(2000):
        print(number, "x" * 40)


if __name__ == "__main__":
    ENDS[int(os.environ["RANK"])]()
