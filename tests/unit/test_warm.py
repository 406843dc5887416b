"""Fork servers that outlive runs: when one is used, when not, and that nothing of them stays."""

import contextlib
import os
import select
import signal
import stat
import time
from pathlib import Path

import msgspec
import pytest

from clusterkit import api
from clusterkit.agent import warm
from clusterkit.agent.processes import is_alive, processes_of, start_ticks
from clusterkit.backends.local.backend import LocalBackend
from clusterkit.cluster import LocalCluster
from clusterkit.errors import BadInput
from clusterkit.spec import JobSpec
from tests.unit import test_forkserver
from tests.unit.test_forkserver import Agent

packages = test_forkserver.packages
TORCH = "import os\ntoken = os.urandom(8).hex()\n"
"""Tells one import of it from another."""
PROGRAM = "import os, torch\nprint(torch.token, os.getppid(), os.environ.get('OTHER'))\n"
HELD = PROGRAM + "import sys\nwith open(sys.argv[1]) as pipe: sys.exit(int(pipe.read()))\n"


@pytest.fixture
def folder(tmp_path):
    """Of the servers."""
    return tmp_path / "home" / "warm"


@pytest.fixture
def torch(packages, tmp_path):
    """Writes a torch, as if long ago."""

    def write(text=TORCH, age=60.0):
        packages("torch", text)
        place = next(Path(os.environ["PYTHONPATH"]).glob("torch.py"))
        for path in (place, place.parent):
            os.utime(path, times=(time.time() - age,) * 2)

    return write


@pytest.fixture
def begin(tmp_path, torch, folder):
    """Begins a run of a program that leaves a server behind."""
    torch()
    started = []
    place = tmp_path / "home" / "runs"
    place.mkdir(parents=True)

    def begin(program=PROGRAM, *arguments, idle=600, **settings):
        settings = {"PYTHONDONTWRITEBYTECODE": "1", **settings}
        options = [*settings.pop("options", ()), "--warm", str(idle)]
        run = settings.pop("run", f"run-{len(started)}")
        started.append(Agent(place, program, *arguments, options=options, run=run, **settings))
        return started[-1]

    yield begin
    for each in started:
        each.process.terminate()
        each.process.communicate()
    if folder.exists():
        warm.end(folder)
    assert [path.name for path in folder.glob("*")] in ([], ["lock"])
    assert processes_of(str(place), "PYTHONPATH") == []


@pytest.fixture
def run(begin):
    """Runs one to its end: what it says."""

    def run(*words, **settings):
        begun = begin(*words, **settings)
        assert begun.end() == 0, begun.lines()
        return begun.says()[0].split()

    return run


@pytest.fixture
def pipes(tmp_path):
    """Named pipes for programs that wait for an exit code."""

    def make(name):
        os.mkfifo(tmp_path / name)
        return tmp_path / name

    return make


def ended(pid):
    """Wait for its end, as long as it takes."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        select.select([handle], [], [])
        os.close(handle)


def notes(begun):
    return [line.text for line in begun.lines() if "warm" in line.text]


def test_the_next_run_imports_nothing_and_has_nothing_of_the_one_before(run, folder):
    program = PROGRAM + "assert not hasattr(torch, 'done')\ntorch.done = os.environ['DONE'] = '1'\n"
    first, second, third = (run(program) for _ in range(3))
    # What the first had imported is known after it: the server has begun anew with that.
    assert second[0] == third[0]
    assert len({first[1], second[1], third[1]}) == 3
    (server,) = warm.servers(folder)
    assert is_alive(server)
    assert str(server["pid"]) not in {first[1], second[1], third[1]}
    (socket,) = folder.glob("*.sock")
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_without_the_option_nothing_stays(begin, folder):
    begun = begin(idle=0)
    assert begun.end() == 0
    assert not folder.exists()


def test_what_has_changed_on_disk_is_imported_anew(run, torch):
    before = [run()[0] for _ in range(2)]
    torch("token = 'changed'\n", age=50)
    assert [run()[0] for _ in range(2)] == ["changed"] * 2
    torch(age=40)
    assert run()[0] not in {*before, "changed"}


def test_what_is_as_young_as_the_server_may_have_been_another_when_it_was_imported(run, torch):
    torch(age=-3600)
    assert len({run()[0] for _ in range(3)}) == 3


def test_a_package_that_comes_has_all_imported_anew(run, packages):
    run()
    before = run()[0]
    packages("other", "")
    assert run()[0] != before


def test_another_environment_program_or_interpreter_is_another_server(run, folder):
    plain = [run() for _ in range(2)][1]
    other = [run(OTHER="x") for _ in range(2)][1]
    options = [run(python=["-X", "dev"]) for _ in range(2)][1]
    assert [other[2], options[2]] == ["x", "None"]
    assert len({plain[0], other[0], options[0]}) == len(warm.servers(folder)) == 3
    assert run()[0] == plain[0]


def test_no_more_than_four_stay_those_that_were_used_last(run, folder):
    for number in range(5):
        run(OTHER=str(number))
    assert len(warm.servers(folder)) == 4
    kept = {each["key"] for each in warm.servers(folder)}
    run(OTHER="1")
    assert {each["key"] for each in warm.servers(folder)} == kept


def test_two_runs_at_once_have_one_server_and_ends_of_their_own(run, begin, pipes, folder):
    run()
    run()
    first, second = (begin(HELD, str(pipes(name)), run=name) for name in ("a", "b"))
    while not (first.says() and second.says()):
        time.sleep(0.01)
    assert first.says()[0].split()[0] == second.says()[0].split()[0]
    for begun, code in ((first, 3), (second, 0)):
        (Path(folder).parents[1] / begun.folder.parents[2].name).write_text(str(code))
        assert begun.end() == code
    assert len(warm.servers(folder)) == 1


def test_a_server_ends_by_itself_and_leaves_nothing(run, folder):
    run(idle=0.2)
    for server in warm.servers(folder):
        ended(server["pid"])
    assert [path.name for path in folder.iterdir()] == ["lock"]
    assert run(idle=0.2)


def test_off_ends_servers_and_what_they_serve_goes_on(begin, pipes, folder, monkeypatch):
    monkeypatch.setenv("CLUSTERKIT_HOME", str(folder.parent))
    api.warm("on", "10m")
    pipe = pipes("held")
    begun = begin(HELD, str(pipe))
    while not begun.says():
        time.sleep(0.01)
    found = api.warm()
    assert (found.on, found.idle_seconds) == (True, 600.0)
    (server,) = found.servers
    assert server.program == "program.py"
    assert server.memory_mib > 0
    assert api.warm("off").servers == ()
    assert start_ticks(server.pid) is None
    assert [path.name for path in folder.iterdir()] == ["lock"]
    pipe.write_text("0")
    assert begun.end() == 0
    assert not api.warm().on


def test_a_server_that_was_killed_is_started_anew(run, folder):
    first = run()
    (server,) = warm.servers(folder)
    os.kill(server["pid"], signal.SIGKILL)
    ended(server["pid"])
    assert run()[0] != first[0]
    assert [each["pid"] for each in warm.servers(folder)] != [server["pid"]]


def test_one_that_dies_while_a_run_waits_for_it_means_a_cold_start_and_a_note(begin, torch):
    torch(f"import os, signal\nif os.getsid(0) == os.getpid(): os.kill(os.getpid(), 9)\n{TORCH}")
    begun = begin()
    assert begun.end() == 0
    assert notes(begun) == ["without a warm fork server: it ended"]


def test_where_none_can_be_had_the_start_is_cold_with_a_note(begin, folder):
    folder.write_text("")
    begun = begin()
    assert begun.end() == 0
    assert [note.partition(": ")[0] for note in notes(begun)] == ["without a warm fork server"]
    folder.unlink()


def test_a_fork_that_dies_ends_its_run_with_a_reason_and_not_the_server(begin, run, pipes, folder):
    begun = begin(HELD, str(pipes("held")))
    while not begun.says():
        time.sleep(0.01)
    os.kill(int(begun.says()[0].split()[1]), signal.SIGKILL)
    assert begun.end() == 1
    assert begun.exit["reason"] == "the Python that forks the ranks ended: exit code 1"
    assert len(warm.servers(folder)) == 1
    assert run()


def test_a_fork_that_dies_in_a_later_attempt_ends_the_ranks_of_that(begin, pipes, folder):
    program = "import os, sys\nif os.environ['CLUSTERKIT_ATTEMPT'] == '1': sys.exit(1)\n" + HELD
    begun = begin(
        program, str(pipes("held")), options=("--restarts", "1"), NODE_RANK="0",
        CLUSTERKIT_RUN_ID="run-0",
        CLUSTERKIT_ATTEMPT="1",
    )  # fmt: skip
    begun.folder = begun.folder.parents[1] / "2" / "node-0"
    begun.until_said("None")
    (rank,) = processes_of(str(begun.folder), "CLUSTERKIT_NODE_DIR")
    os.kill(int(begun.says()[0].split()[1]), signal.SIGKILL)
    assert begun.end() == 1
    ended(rank)
    assert len(warm.servers(folder)) == 1


def test_a_cancel_need_not_wait_for_its_imports(begin, torch, pipes, folder):
    torch(f"open({str(pipes('held'))!r}).read()\n")
    begun = begin()
    while not warm.servers(folder):
        time.sleep(0.01)
    begun.process.terminate()
    assert begun.end() == 128 + signal.SIGTERM
    assert begun.says() == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_with_the_agent_end_its_ranks(begin, pipes, folder, how):
    begun = begin(HELD, str(pipes("held")))
    while not begun.says():
        time.sleep(0.01)
    begun.process.send_signal(how)
    begun.process.communicate()
    for rank in processes_of(str(begun.folder), "CLUSTERKIT_NODE_DIR"):
        ended(rank)
    assert len(warm.servers(folder)) == 1


def test_what_a_rank_leaves_behind_ends_with_the_run(begin):
    program = (
        "import subprocess, torch\n"
        "sleep = ['sh', '-c', 'sleep 1000 >/dev/null 2>&1 & echo $!']\n"
        "subprocess.run(sleep, start_new_session=True)\n"
    )
    begun = begin(program)
    begun.end()
    assert start_ticks(int(begun.says()[0])) is None


# ---------------------------------------------------------------- the setting


def test_the_plan_says_that_it_is_warm_and_why(make_facts, clusterkit_home):
    local, job, facts = (
        LocalBackend(),
        JobSpec(name="a", program="a.py", workdir="/w"),
        make_facts(),
    )

    def said(cluster, **fields):
        cluster = local.resolved(cluster, Path("/"), None, None)
        plan = local.plan(msgspec.structs.replace(job, **fields), cluster, facts, "demo-1")
        notes = [note.value for note in plan.notes if note.name == "warm"]
        assert sum(file.text.count("--warm") for file in plan.files if file.text) == len(notes)
        return notes

    cluster = LocalCluster()
    assert said(cluster) == []
    assert said(LocalCluster(warm="90s")) == ["90 s"]
    api.warm("on", "30m")
    assert said(cluster) == ["1800 s"]
    assert said(LocalCluster(warm="90s")) == ["90 s"]
    assert said(cluster, launcher="torchrun") == []
    with pytest.raises(BadInput, match="warm: 'soon' is not a length of time"):
        said(LocalCluster(warm="soon"))


def test_the_verb_says_how_it_stands(cli):
    assert cli("warm").out == "off\n"
    assert cli("warm", "on", "--idle", "90s").out == "on, for 90 s after a run\n"
    assert cli("warm", "--json").json == {"on": True, "idle_seconds": 90.0, "servers": []}
    assert cli("warm", "off", "--json").json["on"] is False
    assert cli("warm", "off").out == "off\n"
    assert "idle: 'x' is not a length of time" in cli("warm", "on", "--idle", "x").err
