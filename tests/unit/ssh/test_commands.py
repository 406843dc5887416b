"""Commands and files over SSH, with a real sshd."""

import ast
import hashlib
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from clusterkit.backends.ssh import transport as ssh_transport
from clusterkit.backends.ssh.config import (
    HostUnreachable,
    LoginRefused,
)
from clusterkit.backends.ssh.transport import SshTransport
from clusterkit.errors import SubmitFailed
from clusterkit.transport import PORTS, Put, fan_out, in_order


@pytest.fixture(scope="module")
def shared(sshd):
    """One connection for all tests that need nothing special."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSH_AUTH_SOCK", raising=False)
        transport = sshd.transport()
        yield transport
        transport.close()


# ---------------------------------------------------------------- commands


def test_run_returns_exit_code_stdout_and_stderr(shared):
    done = shared.run("h0", ["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.exit_code, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_run_passes_arguments_and_environment_unchanged(shared, ugly_values):
    code = "import os, sys; print(ascii((sys.argv[1:], {k: os.environ[k] for k in %r})))"
    words = [*ugly_values.values(), "", "-n", "'", "$(id)"]
    done = shared.run(
        "h0", [sys.executable, "-S", "-c", code % sorted(ugly_values), *words], env=ugly_values
    )
    assert ast.literal_eval(done.stdout) == (words, ugly_values)


def test_run_passes_stdin_byte_for_byte(shared):
    data = bytes(range(256)) * 5000
    code = "import sys, hashlib; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
    done = shared.run("h0", [sys.executable, "-S", "-c", code], stdin=data)
    assert done.stdout.strip() == hashlib.sha256(data).hexdigest()


def test_run_does_not_hang_when_command_ignores_stdin(shared):
    assert shared.run("h0", ["true"], stdin=b"x" * (8 << 20), timeout=60).exit_code == 0


def test_run_collects_large_output_of_stdout_and_stderr(shared):
    script = "i=0; while [ $i -lt 3000 ]; do echo $i; echo $i >&2; i=$((i+1)); done"
    done = shared.run("h0", ["sh", "-c", script], timeout=120)
    lines = "".join(f"{number}\n" for number in range(3000))
    assert (done.stdout, done.stderr) == (lines, lines)


def test_run_environment_secret_appears_in_no_remote_cmdline(shared):
    code = (
        "import glob, os\nfound = 0\nfor path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: found += os.environb[b'TOKEN'] in open(path, 'rb').read()\n"
        "    except OSError: pass\nprint(found, len(os.environ['TOKEN']))"
    )
    secret = os.urandom(20).hex()
    done = shared.run("h0", [sys.executable, "-S", "-c", code], env={"TOKEN": secret})
    assert done.stdout == "0 40\n"


def test_run_of_missing_command_exits_127_and_names_path(shared):
    done = shared.run("h0", ["/nope/no such"])
    assert done.exit_code == 127
    assert "/nope/no such" in done.stderr


def test_run_fails_when_command_exceeds_timeout(shared):
    with pytest.raises(SubmitFailed, match=r"sleep on host h0 did not end within 0\.2 s"):
        shared.run("h0", ["sleep", "30"], timeout=0.2)


def test_run_of_killed_command_keeps_output_and_exits_255(shared):
    done = shared.run("h0", ["sh", "-c", "echo before; kill -9 $$"])
    assert (done.stdout, done.exit_code) == ("before\n", 255)


def test_started_command_outlives_connection_in_own_session(sshd, tmp_path):
    fifo = tmp_path / "fi fo"
    os.mkfifo(fifo)
    transport = sshd.transport()
    script = 'echo "$A $(cut -d" " -f6 /proc/$$/stat)" >"$0"; cat "$0" >/dev/null; sleep 60'
    transport.start("h0", ["sh", "-c", script, str(fifo)], env={"A": "it's"})
    transport.close()
    value, session = fifo.read_text().split()
    assert value == "it's"
    assert int(session) != os.getsid(0)
    assert Path(f"/proc/{session}").exists()
    os.killpg(int(session), signal.SIGKILL)


def test_start_of_missing_command_fails_naming_path(shared):
    with pytest.raises(SubmitFailed, match=r"cannot start /nope on host h0: /nope: not found"):
        shared.start("h0", ["/nope"])


def test_run_ignores_login_shell_banner(other_sshd, home):
    server = other_sshd('ForceCommand echo "Welcome to h0"; eval "$SSH_ORIGINAL_COMMAND"')
    transport = server.transport()
    assert transport.run("h0", ["echo", "out"]).stdout == "out\n"
    transport.close()


@pytest.mark.parametrize(
    ("login", "why"),
    [
        ("exit 1", "it ended with 1"),  # /bin/false
        ("echo not available; exit 1", "it ended with 1: not available"),  # /sbin/nologin
        ("read x; {}", "a start file of the login shell (.bashrc, .profile) reads standard input"),
        ("cat >/dev/null; {}", "a start file of the login shell (.bashrc, .profile) reads"),
    ],
)
def test_login_shell_that_runs_no_commands_is_refused_with_cause(
    other_sshd, home, tmp_path, login, why
):
    command = login.format('eval "$SSH_ORIGINAL_COMMAND"')
    transport = other_sshd(f"ForceCommand {command}").transport()
    # What follows a script that has lost its head must not be run.
    harm = f"touch {tmp_path}/harm\n".encode() * 20
    for call in (
        lambda: transport.run("h0", ["cat"], stdin=harm),
        lambda: transport.put("h0", str(tmp_path / "f"), harm),
        lambda: transport.start("h0", ["true"]),
    ):
        with pytest.raises(LoginRefused) as error:
            call()
        message = error.value.message
        assert message.startswith("host h0: the login shell does not run commands: ")
        assert why in message
    assert not (tmp_path / "harm").exists()
    transport.close()


def test_timeout_of_blocked_login_shell_hints_at_start_files(other_sshd, home):
    transport = other_sshd("ForceCommand sleep 60").transport()
    with pytest.raises(SubmitFailed, match="true on host h0 did not end within 2 s") as error:
        transport.run("h0", ["true"], timeout=2)
    assert "a start file of the login shell (.bashrc" in error.value.hint
    transport.close()


def test_open_stream_writes_reads_and_returns_exit_code(shared):
    with shared.open("h0", ["sh", "-c", "read a; echo got $a; cat; exit 4"]) as stream:
        stream.write(b"first\n")
        assert stream.read(60) == b"got first\n"
        stream.write(b"\0second")
        assert stream.read(60) == b"\0second"
        with pytest.raises(SubmitFailed, match="host h0 no longer answers"):
            stream.read(0.1)
        stream.close_input()
        assert stream.read(60) == b""
        assert stream.exit_code(60) == 4


def test_stream_write_fails_when_host_stalls(shared, monkeypatch):
    monkeypatch.setattr(ssh_transport, "WRITE_SECONDS", 0.5)
    with (
        shared.open("h0", ["sleep", "60"]) as stream,
        pytest.raises(SubmitFailed, match="host h0 no longer answers"),
    ):
        stream.write(bytes(1 << 26))


def test_concurrent_commands_share_one_connection(sshd):
    transport = sshd.transport()
    results = fan_out(
        [f"{n}" for n in range(8)],
        lambda n: transport.run("h0", ["sh", "-c", f"echo {n} $PPID; sleep 0.2"]).stdout,
    )
    assert {n: text.split()[0] for n, text in results.items()} == {n: n for n in results}
    assert len(transport._connections) == 1
    transport.close()


def test_closed_transport_reconnects_on_next_run(sshd):
    transport = sshd.transport()
    for _ in range(2):
        assert transport.run("h0", ["echo", "hi"]).stdout == "hi\n"
        transport.close()


def test_connection_made_during_close_is_closed(sshd, monkeypatch):
    transport = sshd.transport()
    made = []

    def slowly(*args):
        made.append(connect(*args))
        transport.close()
        return made[0]

    connect = ssh_transport.connect
    monkeypatch.setattr(ssh_transport, "connect", slowly)
    with pytest.raises(HostUnreachable, match="the transport was closed"):
        transport.run("h0", ["true"])
    assert not made[0].is_active()
    assert transport._connections == {}


def test_run_reconnects_after_connection_broke(sshd):
    transport = sshd.transport()
    transport.run("h0", ["true"])
    transport.connection("h0").close()
    assert transport.run("h0", ["echo", "again"]).stdout == "again\n"
    transport.close()


def test_stream_reports_connection_lost_during_command(other_sshd, home):
    server = other_sshd()
    transport = server.transport()
    with transport.open("h0", ["sh", "-c", "echo $PPID; sleep 60"]) as stream:
        serving = int(stream.read(60))
        os.kill(serving, signal.SIGKILL)
        assert stream.read(60) == b""
        with pytest.raises(HostUnreachable, match="host h0: the connection was lost"):
            stream.exit_code(60)
    transport.close()


def test_run_beyond_max_sessions_fails_with_hint(other_sshd, home):
    transport = other_sshd("MaxSessions 1").transport()
    with (
        transport.open("h0", ["sleep", "60"]),
        pytest.raises(HostUnreachable, match="h0 refuses another session") as error,
    ):
        transport.run("h0", ["true"])
    assert "MaxSessions" in (error.value.hint or "")
    transport.close()


# ---------------------------------------------------------------- files


def test_put_all_writes_any_name_content_and_mode(shared, weird_tmp_path):
    folder = weird_tmp_path / "new" / "er"
    files = [
        Put(str(folder / "plain"), b"a\n"),
        Put(str(folder / "nul"), bytes(range(256)) * 300, 0o755),
        Put(str(folder / "empty"), b""),
        Put(str(folder / "a\nb 'c' $(id) -n"), b"x", 0o600),
        Put(str(folder / "-rf"), b"y"),
    ]
    shared.put_all("h0", files)
    for file in files:
        path = Path(file.path)
        assert path.read_bytes() == file.data
        assert stat.S_IMODE(path.stat().st_mode) == file.mode
    assert len(os.listdir(folder)) == len(files)
    # Secret or not, what a run keeps on a host is its owner's alone.
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_concurrent_put_all_into_shared_folder_leaves_whole_files(sshd, home, tmp_path):
    hosts = [f"h{number}" for number in range(6)]
    transport = SshTransport([sshd.host(name=name) for name in hosts], connect_timeout=20)
    files = [
        Put(str(tmp_path / "run/files" / name), os.urandom(1 << 16), mode)
        for name, mode in (("agent.pyz", 0o644), ("node.sh", 0o755))
    ]
    for _ in range(5):
        in_order(fan_out(hosts, lambda host: transport.put_all(host, files)))
    transport.close()
    assert {Path(file.path).read_bytes() for file in files} == {file.data for file in files}
    assert sorted(os.listdir(tmp_path / "run/files")) == ["agent.pyz", "node.sh"]


def test_put_replaces_file_atomically(shared, tmp_path):
    (tmp_path / "f").write_bytes(b"old and long")
    with (tmp_path / "f").open("rb") as reader:
        shared.put("h0", str(tmp_path / "f"), b"new")
        assert reader.read() == b"old and long"
    assert (tmp_path / "f").read_bytes() == b"new"


def test_put_to_unwritable_path_fails_with_workdir_hint(shared, tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(SubmitFailed, match=r"host h0: cannot write below .*f: ") as error:
        shared.put("h0", str(tmp_path / "f" / "g"), b"x")
    assert "workdir" in (error.value.hint or "")


@pytest.fixture
def small_disk(tmp_path, sshd):
    """A disk of 64 KiB, seen from the sshd too: it was started before."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "small"
    place.mkdir()
    there = ["nsenter", "--mount", "--target", str(sshd.process.pid)]
    subprocess.run([*there, "mount", "-t", "tmpfs", "-o", "size=64k", "none", place], check=True)
    yield place
    subprocess.run([*there, "umount", place], check=True)


def test_put_on_full_disk_keeps_old_file_and_no_leftovers(shared, small_disk):
    shared.put("h0", str(small_disk / "f"), b"fits")
    with pytest.raises(SubmitFailed, match=r"host h0: cannot write below .*: .*No space left"):
        shared.put("h0", str(small_disk / "f"), os.urandom(200_000))
    assert shared.run("h0", ["cat", str(small_disk / "f")]).stdout == "fits"
    assert shared.run("h0", ["ls", "-A", str(small_disk)]).stdout == "f\n"


def test_free_port_avoids_taken_port(shared):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        port = shared.free_port("h0", taken)
        assert port != taken
        assert port in PORTS
    assert shared.free_port("h0", port) == port


def test_free_port_fails_naming_missing_remote_python(sshd):
    transport = sshd.transport(python="/nope/python")
    with pytest.raises(SubmitFailed, match=r"host h0: no free TCP port found: .*/nope/python"):
        transport.free_port("h0")
    transport.close()
