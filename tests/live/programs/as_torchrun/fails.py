"""Rank 1 fails in the way that its argument names, once rank 0 has ended."""

import os
import sys
import time


class Odd(Exception):
    pass


def chain():
    try:
        {}["missing"]
    except KeyError as error:
        raise Odd("because", 1) from error


WAYS = {
    "raises": chain,
    "exits": lambda: sys.exit(7),
    "text": lambda: sys.exit("that is why"),
    "killed": lambda: os.kill(os.getpid(), 9),
    "aborts": os.abort,
    "at once": lambda: os._exit(3),
    "interrupted": lambda: os.kill(os.getpid(), 2) or time.sleep(9),
    "group": lambda: (_ for _ in ()).throw(ExceptionGroup("two", [ValueError(1), TypeError("x")])),
    "huge": lambda: sys.exit(1 << 80),
    "negative": lambda: sys.exit(-1),
    "recursion": lambda: WAYS["recursion"](),
}

if __name__ == "__main__":
    mark = f"{os.environ['TMPDIR']}/first-{os.environ['TORCHELASTIC_RUN_ID']}"
    if os.environ["RANK"] == "0":
        with open(mark, "w") as file:
            file.write(str(os.getpid()))
        sys.exit()
    while not os.path.exists(mark) or not os.path.getsize(mark):
        time.sleep(0.01)
    with open(mark) as file:
        first = file.read()
    while os.path.exists(f"/proc/{first}/exe"):
        time.sleep(0.01)
    WAYS[sys.argv[1]]()
