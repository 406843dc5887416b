"""What a rank's output says of its end: tracebacks, messages of several lines, last words."""

import itertools
import subprocess
import sys

import pytest

from clusterkit.output import tracebacks
from clusterkit.output.diagnose import diagnose
from clusterkit.run.logs import LogLine
from clusterkit.run.status import NodeStatus, RankExit, State

RANK = 0


def said(text, at=1.0, rank=RANK, prefix=""):
    return [LogLine(at, 0, rank, line and prefix + line) for line in text.splitlines()]


def failure(lines, code=1):
    nodes = [NodeStatus(node=0, host="h", state=State.FAILED, exit_code=1, ended_at=10.0)]
    exits = [RankExit(node=0, rank=RANK, exit_code=code, at=9.0)]
    return diagnose(nodes, lines, rank_exits=exits)


def of_program(text, tmp_path, *arguments):
    """How a run of this program is diagnosed."""
    (tmp_path / "train.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode, "the program was to fail"
    return failure(said(done.stdout + done.stderr), done.returncode), done.stderr


TRACEBACK = (
    'Traceback (most recent call last):\n  File "train.py", line 2, in <module>\n    main()\n'
)
LOAD_STATE_DICT = (
    "RuntimeError: Error(s) in loading state_dict for Linear:\n"
    '\tMissing key(s) in state_dict: "weight", "bias". \n'
    '\tUnexpected key(s) in state_dict: "w". '
)
PYDANTIC = """\
pydantic_core._pydantic_core.ValidationError: 2 validation errors for DeepSpeedZeroConfig
stage
  Input should be 0, 1, 2, 3 or 3 [type=enum, input_value=9, input_type=int]
    For further information visit https://errors.pydantic.dev/2.14/v/enum
bogus
  Extra inputs are not permitted [type=extra_forbidden, input_value=1, input_type=int]
    For further information visit https://errors.pydantic.dev/2.14/v/extra_forbidden"""
CUDA = (
    "torch.AcceleratorError: CUDA error: device-side assert triggered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call.\n"
    "\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)
MPIRUN = """\
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[21697,1],1]
  Exit code:    14"""
BANNER = f"{'-' * 74}\n{MPIRUN}\n{'-' * 74}"


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
@pytest.mark.parametrize("message", [LOAD_STATE_DICT, PYDANTIC, CUDA])
def test_diagnosis_keeps_multi_line_message_whole(message, prefix):
    found = failure(said(TRACEBACK + message, prefix=prefix))
    assert found.cause == message
    assert found.traceback == TRACEBACK + message


@pytest.mark.parametrize(
    "after",
    [
        "[rank0]:[W1122 10:11:12.1 ProcessGroupNCCL.cpp:1524] Warning: destroy_process_group()",
        "W1122 10:11:12.100000 42 torch/distributed/elastic/x.py:1] going",
        "[2026-11-22 23:29:19,509] [INFO] [launch.py:1:main] done",
        "/lib/resource_tracker.py:254: UserWarning: There appear to be 1 leaked objects",
        '@clusterkit {"event": "end"}',
        "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.",
        BANNER,
    ],
)
def test_diagnosis_excludes_output_after_message(after):
    found = failure(said(f"{TRACEBACK}{LOAD_STATE_DICT}\n\n{after}"))
    assert found.cause == LOAD_STATE_DICT
    assert found.traceback == TRACEBACK + LOAD_STATE_DICT


def test_message_with_torch_rank_prefix_ends_with_prefix():
    lines = said(TRACEBACK + LOAD_STATE_DICT, prefix="[rank0]: ") + said("saving what is left")
    assert failure(lines).cause == LOAD_STATE_DICT


def test_message_excludes_output_printed_after_pause():
    lines = said(TRACEBACK + LOAD_STATE_DICT, at=1.0) + said("saving what is left", at=5.0)
    assert failure(lines).cause == LOAD_STATE_DICT


def test_pause_before_message_does_not_cut_traceback():
    lines = said(TRACEBACK, at=1.0) + said(LOAD_STATE_DICT, at=5.0)
    assert failure(lines).cause == LOAD_STATE_DICT


def test_overlong_message_keeps_first_and_last_lines():
    message = "\n".join(["ValueError: many", *(f"detail {n}" for n in range(1000)), "the very end"])
    found = failure(said(TRACEBACK + message))
    lines = found.cause.splitlines()
    assert (lines[0], lines[-1]) == ("ValueError: many", "the very end")
    assert len(lines) <= tracebacks.MESSAGE_LINES + 1
    assert any("962 lines left out" in line for line in lines)


def test_overlong_line_is_cut_in_middle():
    found = failure(said(f"{TRACEBACK}ValueError: {'x' * 100_000} the end"))
    assert found.cause.startswith("ValueError: xx")
    assert found.cause.endswith("xx the end")
    assert "characters left out" in found.cause
    assert len(found.cause) < tracebacks.MESSAGE_CHARACTERS + 100


def test_exception_group_cause_names_members(tmp_path):
    found, printed = of_program(
        "def one():\n    raise ValueError('a\\nb')\n"
        "errors = [KeyError('never raised')]\n"
        "try:\n    one()\nexcept ValueError as error:\n    errors.append(error)\n"
        "raise ExceptionGroup('several', errors)\n",
        tmp_path,
    )
    assert found.cause.splitlines() == [
        "ExceptionGroup: several (2 sub-exceptions)", "KeyError: 'never raised'",
        "ValueError: a", "b",
    ]  # fmt: skip
    assert found.traceback == printed.rstrip()


def test_exception_raised_from_group_is_cause(tmp_path):
    found, printed = of_program(
        "try:\n    raise ExceptionGroup('several', [KeyError('k')])\n"
        "except ExceptionGroup as group:\n    raise OSError('no more') from group\n",
        tmp_path,
    )
    assert found.cause == "OSError: no more"
    assert found.traceback == printed.rstrip()


def test_syntax_error_keeps_file_and_line(tmp_path):
    found, printed = of_program("import sys\ndef f(:\n    pass\n", tmp_path)
    assert found.cause == "SyntaxError: invalid syntax"
    assert found.traceback == printed.rstrip()
    assert 'train.py", line 2' in found.traceback


def test_exception_in_del_of_program_is_not_cause(tmp_path):
    found, printed = of_program(
        "class Engine:\n    def __del__(self):\n        raise RuntimeError('in __del__')\n"
        "engine = Engine()\nraise ValueError('the real one')\n",
        tmp_path,
    )
    assert "RuntimeError: in __del__" in printed
    assert found.cause == "ValueError: the real one"
    assert "__del__" not in (found.traceback or "")


def test_process_pool_exception_keeps_both_tracebacks(tmp_path):
    found, printed = of_program(
        "from concurrent.futures import ProcessPoolExecutor\n"
        "def work():\n    raise ValueError('in the pool\\nsecond line')\n"
        "if __name__ == '__main__':\n"
        "    with ProcessPoolExecutor(1) as pool:\n        pool.submit(work).result()\n",
        tmp_path,
    )
    assert found.cause == "ValueError: in the pool\nsecond line"
    assert (found.traceback or "").count("Traceback") == printed.count("\nTraceback")


def test_faulthandler_crash_names_signal_and_line(tmp_path):
    found, printed = of_program(
        "import ctypes, faulthandler\nfaulthandler.enable()\nctypes.string_at(0)\n", tmp_path
    )
    assert found.exit_code == 139
    assert found.cause == "SIGSEGV: the rank crashed in native code"
    assert found.traceback == printed.rstrip()
    assert 'train.py", line 3' in found.traceback
    assert found.hint is None


@pytest.mark.parametrize(
    ("text", "arguments", "cause"),
    [
        (
            "import argparse\nparser = argparse.ArgumentParser()\n"
            "parser.add_argument('--lr', type=float)\nparser.parse_args()\n",
            ["--lr", "x"],
            "exit code 2: train.py: error: argument --lr: invalid float value: 'x'",
        ),
        (
            "import click\nclick.command()(lambda: None)()\n",
            ["--foo"],
            "exit code 2: Error: No such option '--foo'.",
        ),
        ("import os\nos.write(2, b'step 1\\ndisk check failed\\n')\nos._exit(3)\n", [],
         "exit code 3; last output: disk check failed"),
        ("import sys\nsys.exit('no data: /data is empty\\n  mount it first')\n", [],
         "exit code 1; last output: no data: /data is empty\n  mount it first"),
    ],
)  # fmt: skip
def test_cause_without_traceback_is_line_that_explains_exit(text, arguments, cause, tmp_path):
    found, _ = of_program(text, tmp_path, *arguments)
    assert found.cause == cause
    assert found.traceback is None


# What programs have printed that are not here, or not everywhere.
TERMINATE = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  boom"
HYDRA = "\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."
MISSING = (
    "omegaconf.errors.MissingMandatoryValue: Missing mandatory value: db.port\n"
    "    full_key: db.port\n    object_type=dict"
)
NOT_IN_STRUCT = "Key 'foo' is not in struct\n    full_key: db.foo\n    object_type=dict"
KILLED = (
    "SIGKILL: the rank was killed from outside (kill -9); the kernel counted no out-of-memory kill"
)
NOT_FOUND = """\
mpirun was unable to launch the specified application as it could not access
or execute an executable:

Executable: /nope/x
Node: vm

while attempting to start process rank 0."""


@pytest.mark.parametrize(
    ("text", "code", "cause"),
    [
        (f"step 5\n{TERMINATE}", -6, f"SIGABRT: the rank aborted in native code: {TERMINATE}"),
        ("python: x.c:12: main: Assertion `n > 0' failed.", 134,
         "exit code 134: SIGABRT as a shell reports it, or the program's own code: "
         "python: x.c:12: main: Assertion `n > 0' failed."),
        ("ValueError: of long ago", -9, KILLED),
        (f"starting\n{BANNER}\n", 14, f"exit code 14: {MPIRUN}"),
        (f"{'-' * 74}\n{NOT_FOUND}\n{'-' * 74}\n", 1, f"exit code 1: {NOT_FOUND}"),
        (f"Error executing job with overrides: []\n{TRACEBACK}{MISSING}\n{HYDRA}", 1, MISSING),
        (f"Error executing job with overrides: []\n{MISSING}\n{HYDRA}", 1,
         f"exit code 1: {MISSING}"),
        (f"Could not override 'db.foo'.\n{NOT_IN_STRUCT}\n{HYDRA}", 1,
         f"exit code 1: {NOT_IN_STRUCT}"),
        (f"│ train.py:7 in main │\n╰{'─' * 20}╯\nValueError: boxed by rich", 1,
         "exit code 1: ValueError: boxed by rich"),
        (f"Usage: train [OPTIONS]\n╭─ Error {'─' * 12}╮\n│ No such option: --foo │\n╰{'─' * 20}╯",
         2, "exit code 2: No such option: --foo"),
        (f"disk check failed\n{'=' * 40}\n", 3,
         "exit code 3; last output: disk check failed"),
        (f"+{'-' * 20}+\n| loss | 0.25 |\n+{'-' * 20}+\n", 3,
         "exit code 3; last output: loss | 0.25"),
        ("step 5\nrun.sh: 12: exec: frobnicate: not found", 127,
         "exit code 127: run.sh: 12: exec: frobnicate: not found"),
        ("step 5\nrun.sh: line 3: frobnicate: command not found", 127,
         "exit code 127: run.sh: line 3: frobnicate: command not found"),
        ("/venv/bin/python3: No module named my.train", 1,
         "exit code 1: /venv/bin/python3: No module named my.train"),
        ("cp: cannot stat '/x': No such file or directory", 1,
         "exit code 1: cp: cannot stat '/x': No such file or directory"),
        ("usage: accelerate <command> [<args>] launch [-h]\n"
         "accelerate <command> [<args>] launch: error: unrecognized arguments: --foo", 2,
         "exit code 2: accelerate <command> [<args>] launch: error: unrecognized "
         "arguments: --foo"),
        ("----\n\n====", 3, "exit code 3"),
    ],
)  # fmt: skip
def test_cause_excludes_rulers_banners_and_advice(text, code, cause):
    found = failure(said(text), code)
    assert found.cause == cause


def test_error_printed_long_before_exit_is_not_cause():
    lines = said("OSError: trying once more", at=1.0) + said("no data", at=60.0)
    assert failure(lines, 3).cause == "exit code 3; last output: no data"


def handled(code, *, asked=False):
    lines = said(f"{TRACEBACK}KeyError: 'survived'") + said("going on", at=9.0)
    nodes = [NodeStatus(node=0, host="h", state=State.FAILED, exit_code=code, ended_at=10.0)]
    ends = [RankExit(0, RANK, code, 60.0, asked=asked)]
    return diagnose(nodes, lines, rank_exits=ends)


@pytest.mark.parametrize(
    ("code", "asked", "cause"),
    [
        (5, False, "exit code 5; last traceback printed: KeyError: 'survived'"),
        (5, True, "exit code 5; last traceback printed: KeyError: 'survived'"),
        (-9, False, f"{KILLED}; last traceback printed: KeyError: 'survived'"),
        (1, False, "KeyError: 'survived'"),  # as after an exception that nobody caught
        (-6, False, "KeyError: 'survived'"),  # the interpreter's end aborts now and then
        (-15, True, "KeyError: 'survived'"),  # it hung there, and was ended
    ],
)
def test_earlier_traceback_is_cause_only_when_exit_code_fits(code, asked, cause):
    found = handled(code, asked=asked)
    assert found.cause == cause
    assert found.traceback == f"{TRACEBACK}KeyError: 'survived'"


def test_printed_traceback_of_running_program_follows_exit_code_in_cause(tmp_path):
    found, _ = of_program(
        "import os, traceback\ntry:\n    {}['x']\nexcept KeyError:\n    traceback.print_exc()\n"
        "os._exit(5)\n",
        tmp_path,
    )
    assert found.cause == "exit code 5; last traceback printed: KeyError: 'x'"


def test_rank_that_failed_first_outranks_rank_with_handled_exception():
    lines = said(f"{TRACEBACK}KeyError: 'survived'")
    lines += said(f"{TRACEBACK}ValueError: bad", at=50.0, rank=1)
    nodes = [NodeStatus(node=0, host="h", state=State.FAILED, exit_code=1, ended_at=61.0)]
    ends = [RankExit(0, RANK, 5, 60.0, asked=False), RankExit(0, 1, 1, 50.1, asked=False)]
    assert diagnose(nodes, lines, rank_exits=ends).cause == "ValueError: bad"


# ---------------------------------------------------------------- the launcher's own errors


NO_SLOTS = """\
There are not enough slots available in the system to satisfy the 4
slots that were requested by the application:

  /bin/sh

Either request fewer slots for your application."""
TAKEN = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
    "network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE"
)


@pytest.mark.parametrize(
    ("text", "code", "error"),
    [
        ("usage: torchrun [-h] [--nnodes NNODES]\ntorchrun: error: unrecognized arguments: --x", 2,
         "torchrun: error: unrecognized arguments: --x"),
        ("[2026-11-22 23:29:19,509] [INFO] [runner.py:1:main] going\n"
         "ValueError: No slot '9' specified on host 'localhost'", 1,
         "ValueError: No slot '9' specified on host 'localhost'"),
        (f"{TRACEBACK}{TAKEN}", 1, TAKEN),
        (f"{TRACEBACK}torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", 1,
         "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"),
        (f"{'-' * 74}\n{NO_SLOTS}\n{'-' * 74}", 1, NO_SLOTS),
    ],
)  # fmt: skip
def test_launcher_error_without_ranks_is_cause(text, code, error):
    nodes = [NodeStatus(node=0, host="h", state=State.FAILED, exit_code=code, ended_at=10.0)]
    found = diagnose(nodes, said(text, rank=None))
    assert (found.rank, found.cause) == (None, f"exit code {code} of the launcher: {error}")
    assert (found.traceback is None) == (TRACEBACK not in text)


@pytest.mark.parametrize("other", ["REPORT", "ASKED"])
def test_launcher_report_of_ranks_is_not_launcher_error(other):
    nodes = [NodeStatus(node=0, host="h", state=State.FAILED, exit_code=1, ended_at=10.0)]
    lines = said(f"this node waits\n{globals()[other]}\nbye", rank=None)
    found = diagnose(nodes, lines)
    assert (found.cause, found.traceback) == ("exit code 1 of the launcher", None)


# ---------------------------------------------------------------- torchrun's own traceback

REPORT = f"""\
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1032, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
{"=" * 60}
train.py FAILED
{"-" * 60}
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
{"=" * 60}"""
ASKED = (
    f"{TRACEBACK}torch.distributed.elastic.multiprocessing.api.SignalException: "
    "Process 7 got signal: 15"
)


def folded(lines: list[LogLine]) -> list[LogLine]:
    """As `tracebacks.collapse_torchrun_reports`, with batches of one line and of all of them."""
    one = [
        line
        for batch in tracebacks.collapse_torchrun_reports([line] for line in lines)
        for line in batch
    ]
    assert one == [
        line for batch in tracebacks.collapse_torchrun_reports([lines]) for line in batch
    ]
    return one


@pytest.mark.parametrize(
    ("report", "words"),
    [(REPORT, "(ChildFailedError): 11 lines"),
     (ASKED, "(SignalException: Process 7 got signal: 15): 4 lines")],
)  # fmt: skip
def test_torchrun_report_collapses_to_one_line_with_hint(report, words):
    before, after = said("E1122 failed", rank=None), said("bye", rank=None)
    lines = [*before, *said(report, rank=None), *after]
    shown = folded(lines)
    assert [shown[0], shown[2]] == [*before, *after]
    assert words in shown[1].text
    assert "logs --raw" in shown[1].text
    assert (shown[1].rank, shown[1].time) == (None, lines[1].time)


def test_interleaved_torchrun_reports_collapse_per_node():
    one, two = ([LogLine(1.0, node, None, text) for text in REPORT.splitlines()] for node in (0, 1))
    mixed = list(itertools.chain(*zip(one, two, strict=True)))
    assert [line.node for line in folded(mixed)] == [0, 1]


def test_rank_traceback_and_other_launcher_error_do_not_collapse():
    own = said(REPORT, rank=3)
    other = said(f"{TRACEBACK}torch.distributed.DistNetworkError: port 29500 is taken", rank=None)
    assert folded([*own, *other]) == [*own, *other]


def test_truncated_torchrun_report_does_not_collapse():
    lines = said(REPORT, rank=None)[:5]
    assert folded(lines) == lines


@pytest.mark.parametrize(
    "words",
    [
        "in: <function Model.__del__ at 0x7f>",  # up to 3.13
        "on flushing sys.stdout:",  # 3.13
        "while calling deallocator <function Model.__del__ at 0x7f>:",  # 3.14
        "while finalizing generator <generator object f at 0x7f>:",
    ],
)
def test_exception_ignored_by_interpreter_is_not_cause(words):
    ignored = f"Exception ignored {words}\n{TRACEBACK}AttributeError: no attribute 'close'"
    assert failure(said(f"{TRACEBACK}ValueError: bad\n{ignored}")).cause == "ValueError: bad"
