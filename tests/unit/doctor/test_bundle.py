"""What is sent to a host, what runs there, and what is made of its output."""

import ast
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from clusterkit.doctor.hosts import bundle, collect
from clusterkit.doctor.hosts.base import Collector
from clusterkit.doctor.hosts.checks import CHECKS
from clusterkit.doctor.hosts.collect import runner
from clusterkit.hosts import host_probe
from tests import pythons
from tests.forked import at_start
from tests.unit.doctor import misbehaving as bad

COLLECTORS = list({each.name: each for check in CHECKS for each in check.collectors}.values())


def ran(*collectors, context=None, python=sys.executable, time_factor=1.0, before=(), **options):
    argv, program = bundle.command(collectors, context or {}, python, time_factor)
    done = subprocess.run(
        [*before, *argv], input=program.decode(), capture_output=True, text=True, timeout=60,
        **options,
    )  # fmt: skip
    return done, bundle.parse(done.stdout, "h0")


def value(output):
    assert output.error is None
    assert output.timed_out is None
    return msgspec.json.decode(output.value)


# ---------------------------------------------------------------- the driver


def test_bundle_returns_value_per_collector_and_host_times():
    before = time.time()
    done, reply = ran(
        Collector(bad.echo, object), Collector(bad.nap, object), context={"a": [1, "é"]}
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert {name: value(output) for name, output in reply.outputs.items()} == {
        "echo": {"a": [1, "é"]},
        "nap": "woke",
    }
    assert before <= reply.began <= reply.ended <= time.time()
    assert reply.interpreter == sys.executable


def test_bundle_ignores_modules_that_python_imported_as_it_started(tmp_path):
    names = ("contextlib", "json", "selectors", "signal", "subprocess", "threading", "types")
    for path, text in at_start(*names).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    collector = Collector(bad.echo, object, site_packages=True)
    done, reply = ran(collector, context={"a": 1}, env=env)
    assert (done.returncode, done.stderr, reply.interpreter) == (0, "", sys.executable)
    assert value(reply.outputs["echo"]) == {"a": 1}


def test_hanging_collector_times_out_without_delaying_others():
    began = time.monotonic()
    _, reply = ran(Collector(bad.hang, object, timeout=0.5), Collector(bad.echo, object))
    assert time.monotonic() - began < 30
    assert reply.outputs["hang"].timed_out in ("S", "R", "D")
    assert value(reply.outputs["echo"]) == {}
    assert reply.ended is not None


def test_time_factor_extends_collector_timeout():
    _, reply = ran(Collector(bad.nap, object, timeout=0.001), time_factor=30000)
    assert value(reply.outputs["nap"]) == "woke"


def test_collector_failure_becomes_error_of_that_collector_only():
    _, reply = ran(
        Collector(bad.fail, object),
        Collector(bad.flood, object),
        Collector(bad.die, object),
        Collector(bad.unprintable, object),
        Collector(bad.echo, object),
    )
    assert reply.outputs["fail"].error.startswith("FileNotFoundError: ")
    assert "more than" in reply.outputs["flood"].error
    assert reply.outputs["die"].error == "it was killed"
    assert reply.outputs["unprintable"].error.startswith("TypeError")
    assert value(reply.outputs["echo"]) == {}
    assert reply.ended is not None


def test_collector_prints_cannot_corrupt_other_outputs():
    done, reply = ran(Collector(bad.shout, object), Collector(bad.echo, object))
    assert value(reply.outputs["shout"]) == "quiet"
    assert value(reply.outputs["echo"]) == {}
    assert "garbage" not in done.stdout + done.stderr


def test_collector_undecodable_text_is_replaced_and_rest_kept():
    _, reply = ran(
        Collector(bad.ugly, object), env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    )
    assert value(reply.outputs["ugly"]) == ["?", "\u2028\n\r\x0b", "日本", "??"]


def test_collector_with_newer_annotations_runs():
    _, reply = ran(Collector(bad.annotated, object))
    assert value(reply.outputs["annotated"]) == "fine"


def test_bundle_answers_while_child_of_collector_still_lives():
    began = time.monotonic()
    _, reply = ran(Collector(bad.leave_a_child, object, timeout=30))
    os.kill(value(reply.outputs["leave_a_child"]), 9)
    assert time.monotonic() - began < 30


def test_bundle_completes_when_sigchld_is_ignored():
    asked = [Collector(bad.echo, object), Collector(bad.annotated, object)]
    _, reply = ran(*asked, before=["/usr/bin/env", "--ignore-signal=CHLD"])
    assert set(reply.outputs) == {"echo", "annotated"}
    assert reply.ended is not None


def test_failed_fork_becomes_collector_error(monkeypatch):
    def no_fork():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_fork)
    found = runner.outputs([{"name": "echo", "timeout": 1}], {})
    assert "cannot start a process: " in found["echo"]["error"]


# ---------------------------------------------------------------- interpreters


def test_bundle_falls_back_when_rank_interpreter_is_broken(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no such libpython' >&2\nexit 1\n")
    broken.chmod(0o755)
    done, reply = ran(Collector(bad.echo, object), python=str(broken))
    assert value(reply.outputs["echo"]) == {}
    assert reply.interpreter != str(broken)
    assert "no such libpython" in done.stderr


def test_bundle_names_missing_interpreter_without_printing_program():
    done, reply = ran(Collector(bad.echo, object), python="/nope/python")
    assert value(reply.outputs["echo"]) == {}
    assert "/nope/python" in done.stderr
    assert len(done.stderr) < 200


def test_bundle_without_any_python_exits_127_and_never_begins(tmp_path):
    argv, program = bundle.command([Collector(bad.echo, object)], {}, "/nope/python")
    argv = argv[: argv.index("/nope/python") + 1]  # without the others
    done = subprocess.run(argv, input=program.decode(), capture_output=True, text=True)
    assert done.returncode == 127
    assert bundle.parse(done.stdout, "h0").began is None


def test_bundle_ignores_modules_in_current_directory(tmp_path):
    for name in ("json", "types", "select"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('read the wrong one')\n")
    for site_packages in (False, True):
        _, reply = ran(Collector(bad.echo, object, site_packages=site_packages), cwd=tmp_path)
        assert value(reply.outputs["echo"]) == {}


def test_bundle_runs_isolated_python_unless_site_packages_are_needed():
    for site_packages, flags in ((False, [1, 1, False]), (True, [0, 0, False])):
        _, reply = ran(Collector(bad.flags, object, site_packages=site_packages))
        assert value(reply.outputs["flags"]) == flags


@pytest.mark.parametrize("text", ["it's", 'a "b"', "$HOME `id` \\ % \n", "日本", ""])
def test_bundle_context_reaches_collector_unchanged(text):
    _, reply = ran(
        Collector(bad.echo, object), context={"workdir": text, "none": None, "yes": True}
    )
    assert value(reply.outputs["echo"]) == {"workdir": text, "none": None, "yes": True}


def test_bundle_context_holds_5000_hosts():
    """An argument takes 128 KiB; this comes on standard input."""
    hosts = [[f"a-long-name-of-a-node-{i}.example.com", f"10.20.0.{i}"] for i in range(5000)]
    _, reply = ran(Collector(bad.count, object), context={"hosts": hosts})
    assert value(reply.outputs["count"]) == 5000


# ---------------------------------------------------------------- parsing

DOCUMENT = {
    "began": 5.0, "ended": 6.0, "interpreter": "p", "reached_at": "10.0.0.1", "installer": "dnf",
    "outputs": {"a": {"value": {"x": 1}}, "b": {"error": "broken"}, "c": {"timed_out": "D"}},
}  # fmt: skip


def text(**changed):
    return f"\n{runner.MARK}{json.dumps(DOCUMENT | changed)}\n"


def test_parse_finds_document_behind_login_banner():
    reply = bundle.parse("Welcome to h1!\nno newline at the end" + text() + "bye\n", "h0")
    assert (reply.began, reply.ended, reply.interpreter) == (5.0, 6.0, "p")
    assert reply.reached_at == "10.0.0.1"
    assert reply.installer == "dnf"
    assert msgspec.json.decode(reply.outputs["a"].value) == {"x": 1}
    assert reply.outputs["b"].error == "broken"
    assert reply.outputs["c"].timed_out == "D"


@pytest.mark.parametrize("cut", range(1, len(text()) - 1, 7))
def test_parse_of_truncated_output_gives_no_answer(cut):
    reply = bundle.parse(text()[:cut], "h0")
    assert reply.began is None
    assert (reply.error is not None) is (runner.MARK in text()[:cut])


@pytest.mark.parametrize(
    "stdout",
    ["", "\0\0", "@clusterkit-doctor", "@clusterkit-doctor []", "@clusterkit-doctor {}",
     '@clusterkit-doctor {"name": 5}', '@clusterkit-doctor {"began": "x"}',
     'x @clusterkit-doctor {"began": 1}', "\ufffd" * 100],
)  # fmt: skip
def test_parse_of_garbage_gives_no_answer(stdout):
    reply = bundle.parse(stdout, "h0")
    assert reply.outputs == {}
    assert reply.began is None


def test_parse_takes_second_document_when_first_is_truncated():
    reply = bundle.parse(text()[:40] + text(interpreter="q"), "h0")
    assert reply.interpreter == "q"


# ---------------------------------------------------------------- every collector

SENT = [*Path(collect.__file__).parent.glob("*.py"), Path(host_probe.__file__)]


@pytest.mark.parametrize("path", SENT, ids=lambda path: path.name)
def test_sent_modules_parse_as_python_3_8_and_import_only_stdlib(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    ours = {"clusterkit.hosts.host_probe", "clusterkit.doctor.hosts.collect"}
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            names = [] if below <= ours else [node.module]
        for name in names:
            assert name in ours or name.split(".")[0] in sys.stdlib_module_names, name


def test_collector_names_are_unique():
    assert len(COLLECTORS) == len({each.collect for each in COLLECTORS})


def test_every_collector_runs_on_every_installed_python(tmp_path):
    """Also on those that are too old for jobs: that is what doctor says of them."""
    found = [path for n in range(8, 15) if (path := pythons.find(f"3.{n}"))]
    assert found
    context = {
        "host": "h0", "head": "h0", "hosts": [["h0", "127.0.0.1"]], "present": ["h0"],
        "workdir": str(tmp_path), "shared": str(tmp_path), "port": None, "checks": [],
        "cuda_home": None, "time_factor": 1.0,
    }  # fmt: skip
    for number, python in enumerate(found):
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        met = context | {"token": str(number), "port": port}
        done, reply = ran(*COLLECTORS, context=met, python=python)
        assert (reply.interpreter, done.stderr) == (python, "")
        assert reply.outputs.keys() == {each.name for each in COLLECTORS}
        for each in COLLECTORS:
            msgspec.json.decode(json.dumps(value(reply.outputs[each.name])), type=each.kind)
