"""Finds the cause of a rank's end in its output: its last traceback, or else its last error line.

Nothing in the output marks the end of an exception's message. Where torch writes ``[rank3]: ``
before every line of a traceback, it ends with them. Elsewhere it is what follows without a pause,
up to a line that is known not to belong to it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from clusterkit.run.logs import LogLine, without_rank

MESSAGE_LINES = 40
MESSAGE_CHARACTERS = 4096
TRACEBACK_LINES = 400
PAUSE_SECONDS = 1.0
"""A longer time between two lines means that they were not printed together."""

_BEGINS = re.compile(
    r"\s*(\+ Exception Group )?Traceback \(most recent call last\):"
    r'|  File ".*", line \d+$'  # of a SyntaxError in the program itself
    r"|Fatal Python error: "  # faulthandler, and an interpreter that cannot go on
)
_FATAL = "Fatal Python error: "
_CHAINS = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
# The left margin in the traceback of an ExceptionGroup, and the lines between its parts.
_GUTTER = re.compile(r"\s+(\|( |$)|\+[-+])")
# "in", "on", and from Python 3.14 on "while calling deallocator", "while flushing sys.stdout", ...
_UNRAISABLE = "Exception ignored "
_ADVICE = (
    r"Set the environment variable HYDRA_FULL_ERROR=1|note: run with `RUST_BACKTRACE"
    r"|Try '.*' for help"
)
_NOT_OF_A_MESSAGE = re.compile(
    rf"{_ADVICE}|{_UNRAISABLE}"
    r"|-{70,}$"  # mpirun's banner
    r"|\S+\.py:\d+: \w*Warning: "
    r"|(\[rank\d+\]:)?\[[WEI]\d{4} |[WEI]\d{4} \d\d:|\[\d{4}-\d\d-\d\d "  # of a logger
)
_ADVICE_LINE = re.compile(_ADVICE)
_BORDER = re.compile(r"^[│┃|] ?|\s*[│┃|]$")
_RULER = re.compile(r"[\W_]{4,}|[╭┌┏].*[╮┐┓]")
_RULER_OF_AN_ERROR = re.compile(r"[╭┌┏]\W*Error\W|-{70,}$")  # rich's and mpirun's
_NAMES_AN_ERROR = re.compile(
    r"[\w.]*[A-Z]\w*(Error|Exception|Exit|Interrupt)(: |:?$)"
    r"|([a-z_]\w*\.)+[A-Z]\w*: "
    r"|([Ff]atal )?[Ee]rror: |FATAL: "
    r"|\S[^:]{0,60}: error: "  # argparse, compilers
    r"|\S+: .*(: not found|command not found|[Nn]o such file or directory|[Pp]ermission denied"
    r"|No space left on device|(Is|Not) a directory)$"  # shells, and what perror(3) prints
    r"|\S*python[\d.]*: (No module named|can't (open|find)|Error while finding) "
    r"|terminate called |.*: Assertion .* failed"
)
# What torchrun prints when a rank failed and when it was stopped; it is not the cause.
REPORT = re.compile(r"torch\.distributed\.elastic\.\S*(ChildFailedError|SignalException)\b")


class Output:
    """The output of one rank, passed to `read` line by line.

    ``traceback`` is its newest traceback, with those that led to it, and ``began`` the time of its
    first line. One that the interpreter ignored (in a ``__del__``) does not count.
    """

    def __init__(self) -> None:
        self.traceback: list[str] = []
        self.began = 0.0
        self._message: list[str] = []
        self._part = ""  # of a traceback: "frames", "message", "chain"; "" outside of one
        self._prefixed = self._grouped = self._ignored = False
        self._tail: deque[tuple[float, str]] = deque(maxlen=MESSAGE_LINES)

    def read(self, line: LogLine) -> None:
        """Process the next line."""
        if line.event is not None:
            self._part = ""
            self._tail.clear()
            return
        text = without_rank(line.text)
        prefixed = text != line.text
        paused = bool(self._tail) and line.time - self._tail[-1][0] > PAUSE_SECONDS
        self._tail.append((line.time, text))
        if self._part == "message" and ((text and not prefixed) if self._prefixed else paused):
            self._part = ""
        if self._part and self._grouped and _GUTTER.match(text):
            self._read_group(text)
        elif self._part == "frames" and not self._grouped:
            self._read_on(text, text)
        elif _BEGINS.match(text) and not (self._part and text.startswith("  File")):
            self._begin(line.time, text, prefixed)
        elif self._part and text.startswith(_CHAINS):
            self.traceback.append(text)
            self._part = "chain"
        elif self._part == "message" and not _NOT_OF_A_MESSAGE.match(text):
            self._read_on(text, text)
        elif self._part and not text:
            self.traceback.append(text)
        else:
            self._part = ""
        self._ignored = text.startswith(_UNRAISABLE)

    def _begin(self, time: float, text: str, prefixed: bool) -> None:
        if self._ignored:
            self._part = ""
            return
        if self._part != "chain":
            # The program survived the exception that it printed before.
            self.traceback, self.began = [], time
        self._prefixed, self._grouped = prefixed, "Exception Group" in text
        self._message = [text] if text.startswith(_FATAL) else []
        self._part = "message" if self._message else "frames"
        self.traceback.append(text)

    def _read_group(self, text: str) -> None:
        plain = _GUTTER.sub("", text, count=1)
        if text.lstrip().startswith("+") or plain.startswith(("Traceback", *_CHAINS)):
            self._part = "frames"  # of the next exception of the group
            self.traceback.append(text)
        else:
            self._read_on(text, plain)

    def _read_on(self, raw: str, text: str) -> None:
        """Add a line of a frame or a message; ``text`` has no margin of an ExceptionGroup."""
        self.traceback.append(raw)
        if self._part == "message" or (text and not text[0].isspace()):
            self._part = "message"
            self._message.append(text)

    @property
    def message(self) -> str:
        """The exception's name and message, cut in the middle if it is very long."""
        return _bounded(_trimmed(self._message), MESSAGE_LINES)

    @property
    def fatal(self) -> bool:
        """Whether the traceback is of a crash and not of an exception."""
        return bool(self._message) and self._message[0].startswith(_FATAL)

    def traceback_text(self) -> str | None:
        """Return the traceback as printed, cut in the middle if it is very long; None: none."""
        return _bounded(_trimmed(self.traceback), TRACEBACK_LINES) or None

    def error_line(self) -> str:
        """Return the last line that names an error, and what follows it; empty if none does.

        Only lines after the last pause count.
        """
        lines = list(self._tail)
        pauses = [n for n, (a, b) in enumerate(pairwise(lines), 1) if b[0] - a[0] > PAUSE_SECONDS]
        texts = [text for _, text in lines[pauses[-1] if pauses else 0 :]]
        named = [number for number, text in enumerate(texts) if _NAMES_AN_ERROR.match(text)]
        if not named:
            return ""
        after = texts[named[-1] :]
        end = next((n for n, text in enumerate(after) if _is_noise(text) and text), len(after))
        return _bounded(_trimmed(after[:end]), MESSAGE_LINES)

    def final_lines(self) -> tuple[str, bool]:
        """Return `error_line`, or the last line with text and the block to which it belongs: the
        text between two rulers, or an unindented line and the indented ones below it.

        The second value: whether it is an error, and not just what came last.
        """
        if error := self.error_line():
            return error, True
        texts = [text for _, text in self._tail]
        noise = []
        while texts and _is_noise(texts[-1]):
            noise.append(texts.pop())
        rulers = [number for number, text in enumerate(texts) if _is_ruler(text)]
        is_error = any(map(_ADVICE_LINE.match, noise))
        if any(map(_is_ruler, noise)) and rulers:
            is_error = is_error or _RULER_OF_AN_ERROR.match(texts[rulers[-1]]) is not None
            found = [_BORDER.sub("", text) for text in texts[rulers[-1] + 1 :]]
        else:
            heads = [number for number, text in enumerate(texts) if not text[:1].isspace() and text]
            found = texts[heads[-1] if heads else 0 :]
        return _bounded(_trimmed(found), MESSAGE_LINES), is_error


def begins(text: str) -> bool:
    """Return whether a line is the first of a traceback."""
    return _BEGINS.match(without_rank(text)) is not None


def collapse_torchrun_reports(batches: Iterable[list[LogLine]]) -> Iterator[list[LogLine]]:
    """Yield the same lines, with torchrun's own traceback about a failed rank as one line.

    Another traceback of a launcher may be the failure itself, and is kept.
    """
    held: dict[int, list[LogLine]] = {}
    for batch in batches:
        yield [shown for line in batch for shown in _unless_report(line, held)]
    yield from held.values()


def _unless_report(line: LogLine, held: dict[int, list[LogLine]]) -> list[LogLine]:
    """Return the lines to show after ``line``; ``held`` keeps each node's unfinished traceback."""
    if line.rank is not None or (line.node not in held and not begins(line.text)):
        return [line]
    block = held.setdefault(line.node, [])
    block.append(line)
    report = next((one for one in block if REPORT.match(one.text)), None)
    if report is None:
        # Frames begin with blanks; a line that does not ends another kind of traceback.
        more = line is block[0] or line.text[:1].isspace()
        return [] if more else held.pop(line.node)
    if "ChildFailedError" in report.text and sum(o.text.startswith("=====") for o in block) < 2:
        return []
    error = report.text.rpartition(".")[2].strip().rstrip(":")
    text = f"torchrun's own traceback ({error}): {len(block)} lines; logs --raw shows them"
    return [msgspec.structs.replace(held.pop(line.node)[0], text=text)]


def _is_noise(text: str) -> bool:
    return not text.strip() or _is_ruler(text) or _ADVICE_LINE.match(text) is not None


def _is_ruler(text: str) -> bool:
    return _RULER.fullmatch(text.strip()) is not None


def _trimmed(lines: Sequence[str]) -> list[str]:
    """Return the lines without empty ones at either end."""
    full = [number for number, text in enumerate(lines) if text.strip()]
    return list(lines[full[0] : full[-1] + 1]) if full else []


def _bounded(lines: list[str], most: int) -> str:
    """Join the lines; of a very long text keep the beginning and the end, with a note between."""
    if len(lines) > most:
        half = most // 2
        lines[half:-half] = [f"... {len(lines) - 2 * half} lines left out, the log has them ..."]
    text = "\n".join(lines)
    characters = most * MESSAGE_CHARACTERS // MESSAGE_LINES
    if len(text) > characters:
        half = characters // 2
        left = len(text) - 2 * half
        text = f"{text[:half]} ... {left} characters left out, the log has them ... {text[-half:]}"
    return text
