"""What is sent to a host, what runs there, and what is made of its output."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from clusterkit.doctor.hosts import bundle, meeting, runner
from clusterkit.doctor.hosts.base import Script
from clusterkit.doctor.hosts.checks import CHECKS

SCRIPTS = list({script.name: script for check in CHECKS for script in check.scripts}.values())


def ran(*scripts, given=None, python=sys.executable, env=None, time_factor=1.0):
    argv = bundle.command(scripts, given or {}, python, time_factor)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env)
    return done, bundle.parse(done.stdout)


def value(output):
    assert output.error is None
    assert output.timed_out is None
    return msgspec.json.decode(output.value)


# ---------------------------------------------------------------- functions that are sent


def echo(given):
    return given


def hang(given):
    import time

    time.sleep(60)


def fail(given):
    import os

    os.stat("/nope/nothing")


def flood(given):
    return "x" * (1 << 19)


def shout(given):
    import os

    print("garbage on stdout")
    os.write(1, b'\n@clusterkit-doctor {"name": "echo", "value": "forged"}\n')
    os.write(2, b"garbage on stderr\n")
    return "quiet"


def die(given):
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def ugly(given):
    import os

    return ["\udcff", "\u2028\n\r\x0b", "日本", os.fsdecode(b"\xff\xfe")]


def unprintable(given):
    return {1, 2}


def annotated(given: "dict[str, SomethingUnknown] | None") -> "Any":  # noqa: F821
    return "fine"


def leave_a_child(given):
    import os
    import time

    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        time.sleep(60)
        os._exit(0)
    return child


# ---------------------------------------------------------------- the driver


def test_each_script_gives_its_own_value_and_the_host_tells_its_time():
    before = time.time()
    done, reply = ran(
        Script("one", echo, object),
        Script("two", echo, object, in_process=True),
        given={"a": [1, "é"]},
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert {name: value(output) for name, output in reply.outputs.items()} == {
        "one": {"a": [1, "é"]},
        "two": {"a": [1, "é"]},
    }
    assert before <= reply.began <= reply.ended <= time.time()
    assert reply.interpreter == sys.executable


def test_a_script_that_hangs_is_ended_and_does_not_hold_the_others():
    began = time.monotonic()
    _, reply = ran(Script("hang", hang, object, timeout=0.5), Script("echo", echo, object))
    assert time.monotonic() - began < 30
    assert reply.outputs["hang"].timed_out in ("S", "R", "D")
    assert value(reply.outputs["echo"]) == {}
    assert reply.ended is not None


def test_time_factor_gives_longer():
    _, reply = ran(Script("nap", nap, object, timeout=0.001), time_factor=30000)
    assert value(reply.outputs["nap"]) == "woke"


def nap(given):
    import time

    time.sleep(0.2)
    return "woke"


def test_what_goes_wrong_in_a_script_is_its_own_error():
    _, reply = ran(
        Script("fail", fail, object),
        Script("safe-fail", fail, object, in_process=True),
        Script("flood", flood, object),
        Script("die", die, object),
        Script("unprintable", unprintable, object),
        Script("echo", echo, object),
    )
    assert reply.outputs["fail"].error.startswith("FileNotFoundError: ")
    assert reply.outputs["safe-fail"].error.startswith("FileNotFoundError: ")
    assert "more than" in reply.outputs["flood"].error
    assert reply.outputs["die"].error == "it was killed"
    assert reply.outputs["unprintable"].error.startswith("TypeError")
    assert value(reply.outputs["echo"]) == {}
    assert reply.ended is not None


def test_a_script_cannot_speak_for_another():
    done, reply = ran(Script("shout", shout, object), Script("echo", echo, object))
    assert value(reply.outputs["shout"]) == "quiet"
    assert value(reply.outputs["echo"]) == {}
    assert "garbage" not in done.stdout + done.stderr


def test_text_that_is_none_arrives_in_one_piece():
    _, reply = ran(
        Script("ugly", ugly, object), env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    )
    assert value(reply.outputs["ugly"]) == ["?", "\u2028\n\r\x0b", "日本", "??"]


def test_annotations_of_a_newer_python_are_not_read():
    _, reply = ran(Script("annotated", annotated, object))
    assert value(reply.outputs["annotated"]) == "fine"


def test_the_answer_does_not_wait_for_what_a_script_leaves_behind():
    began = time.monotonic()
    _, reply = ran(Script("leave", leave_a_child, object, timeout=30))
    os.kill(value(reply.outputs["leave"]), 9)
    assert time.monotonic() - began < 30


def test_whoever_ignores_the_end_of_children_does_not_spoil_it():
    argv = bundle.command(
        [Script("one", echo, object), Script("two", echo, object)], {}, sys.executable
    )
    done = subprocess.run(
        ["/usr/bin/env", "--ignore-signal=CHLD", *argv], capture_output=True, text=True
    )
    reply = bundle.parse(done.stdout)
    assert set(reply.outputs) == {"one", "two"}
    assert reply.ended is not None


def test_a_process_limit_is_an_error_of_the_scripts_that_did_not_start(monkeypatch, capfd):
    def no_fork():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_fork)
    running = runner._start_all([{"name": "echo", "timeout": 1}], {})
    assert running == []
    reply = bundle.parse(capfd.readouterr().out)
    assert "cannot start a process: " in reply.outputs["echo"].error


# ---------------------------------------------------------------- interpreters


def test_where_the_interpreter_of_the_ranks_does_not_run_another_answers(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no such libpython' >&2\nexit 1\n")
    broken.chmod(0o755)
    done, reply = ran(Script("echo", echo, object), python=str(broken))
    assert value(reply.outputs["echo"]) == {}
    assert reply.interpreter != str(broken)
    assert "no such libpython" in done.stderr


def test_a_missing_interpreter_is_named_and_the_program_is_not_spilled():
    done, reply = ran(Script("echo", echo, object), python="/nope/python")
    assert value(reply.outputs["echo"]) == {}
    assert "/nope/python" in done.stderr
    assert len(done.stderr) < 200


def test_without_any_python_nothing_began(tmp_path):
    argv = bundle.command([Script("echo", echo, object)], {}, "/nope/python")
    argv = argv[: argv.index("/nope/python") + 1]  # without the others
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 127
    assert bundle.parse(done.stdout).began is None


def test_modules_of_the_current_folder_are_not_read(tmp_path):
    for name in ("json", "base64", "zlib", "select"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('read the wrong one')\n")
    argv = bundle.command([Script("echo", echo, object)], {}, sys.executable)
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert value(bundle.parse(done.stdout).outputs["echo"]) == {}


@pytest.mark.parametrize("text", ["it's", 'a "b"', "$HOME `id` \\ % \n", "日本", ""])
def test_what_is_given_arrives_exactly(text):
    _, reply = ran(Script("echo", echo, object), given={"workdir": text, "none": None, "yes": True})
    assert value(reply.outputs["echo"]) == {"workdir": text, "none": None, "yes": True}


def test_the_command_of_all_scripts_for_many_hosts_fits_into_an_argument():
    hosts = [
        [f"a-long-name-of-a-node-{i}.example.com", f"10.20.{i // 256}.{i}"] for i in range(500)
    ]
    argv = bundle.command(SCRIPTS, {"hosts": hosts}, "python3")
    assert max(map(len, argv)) < 64 << 10  # Linux takes 128 KiB, quoting included


# ---------------------------------------------------------------- parsing

FRAMES = [
    {"began": 5.0, "interpreter": "p", "reached_at": "10.0.0.1", "installer": "dnf"},
    {"name": "a", "value": {"x": 1}},
    {"name": "b", "error": "broken"},
    {"name": "c", "timed_out": "D"},
    {"ended": 6.0},
]


def text(frames=FRAMES):
    return "".join(f"\n{runner.MARK}{json.dumps(frame)}\n" for frame in frames)


def test_frames_are_told_from_a_greeting():
    reply = bundle.parse("Welcome to h1!\nno newline at the end" + text() + "bye\n")
    assert (reply.began, reply.ended, reply.interpreter) == (5.0, 6.0, "p")
    assert reply.reached_at == "10.0.0.1"
    assert reply.installer == "dnf"
    assert msgspec.json.decode(reply.outputs["a"].value) == {"x": 1}
    assert reply.outputs["b"].error == "broken"
    assert reply.outputs["c"].timed_out == "D"


@pytest.mark.parametrize("cut", range(1, len(text()), 7))
def test_output_that_was_cut_short_gives_what_is_whole(cut):
    reply = bundle.parse(text()[:cut])
    assert set(reply.outputs) <= {"a", "b", "c"}
    for output in reply.outputs.values():
        msgspec.json.decode(output.value)


@pytest.mark.parametrize(
    "stdout",
    ["", "\0\0", "@clusterkit-doctor", "@clusterkit-doctor []", "@clusterkit-doctor {}",
     '@clusterkit-doctor {"name": 5}', '@clusterkit-doctor {"began": "x"}',
     'x @clusterkit-doctor {"began": 1}', "\ufffd" * 100],
)  # fmt: skip
def test_garbage_is_no_answer(stdout):
    reply = bundle.parse(stdout)
    assert reply.outputs == {}
    assert reply.began is None


def test_a_second_interpreter_begins_anew():
    reply = bundle.parse(text(FRAMES[:2]) + text([FRAMES[0] | {"interpreter": "q"}, FRAMES[2]]))
    assert reply.interpreter == "q"
    assert set(reply.outputs) == {"b"}


# ---------------------------------------------------------------- every script


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).split(".")[0]


SOURCES = {"runner": bundle.runner_text()}
SOURCES |= {script.name: script.source for script in SCRIPTS}


@pytest.mark.parametrize(("name", "source"), list(SOURCES.items()), ids=list(SOURCES))
def test_what_is_sent_is_python_3_8_of_the_standard_library(name, source):
    tree = ast.parse(source, feature_version=(3, 8))
    assert set(imported(tree)) <= sys.stdlib_module_names | {"__future__"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_needs_nothing_that_stands_beside_it(script):
    """Its text alone is sent: no name of its module may be missing there."""
    if script.whole_module:
        return
    tree = ast.parse(script.source)
    compiled = compile(tree, "<doctor>", "exec", dont_inherit=True)
    function = next(
        c for c in compiled.co_consts if hasattr(c, "co_code") and c.co_name != "<module>"
    )

    def globals_of(code):
        import dis

        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield instruction.argval
        for constant in code.co_consts:
            if hasattr(constant, "co_code"):
                yield from globals_of(constant)

    import builtins

    missing = set(globals_of(function)) - set(dir(builtins))
    # Annotations of inner functions are never read.
    assert missing <= {
        "Any", "versions", "bind_error", "free_port", "addresses", "gpus_on_pci", "ROOT",
        *runner.HELPERS,
    }  # fmt: skip


def test_the_meeting_is_sent_with_its_whole_module():
    script = next(script for script in SCRIPTS if script.name == "meet")
    assert script.source == Path(meeting.__file__).read_text()


def test_names_of_scripts_differ():
    assert len(SCRIPTS) == len({script.collect for script in SCRIPTS})
