"""How commands and files reach this machine."""

import ast
import contextlib
import errno
import inspect
import os
import socket
import stat
import subprocess
import sys

import pytest

from clusterkit.agent import files
from clusterkit.errors import RunFolderError, SubmitFailed
from clusterkit.files import write_atomic
from clusterkit.hosts import host_probe
from clusterkit.transport import PORTS, LocalTransport, Transport

HOST = "localhost"
LOCAL = LocalTransport()


@pytest.fixture
def tiny_disk(tmp_path):
    """A disk of 64 KiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---------------------------------------------------------------- run and start


def test_local_run_returns_exit_code_stdout_and_stderr():
    done = LOCAL.run(HOST, ["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.exit_code, done.stdout, done.stderr) == (3, "out\n", "err\n")
    assert done.argv == ("sh", "-c", "echo out; echo err >&2; exit 3")


def test_local_run_adds_environment_to_own_environment(monkeypatch):
    monkeypatch.setenv("OURS", "1")
    assert LOCAL.run(HOST, ["printenv", "OURS", "A"], env={"A": "x y"}).stdout == "1\nx y\n"


def test_local_run_passes_environment_values_unchanged(ugly_values):
    code = "import os; print(ascii({k: v for k, v in os.environ.items() if k in %r}))"
    done = LOCAL.run(
        HOST, [sys.executable, "-S", "-c", code % sorted(ugly_values)], env=ugly_values
    )
    assert ast.literal_eval(done.stdout) == ugly_values


def test_local_run_replaces_invalid_utf8_in_output():
    assert LOCAL.run(HOST, ["printf", r"a\377b"]).stdout == "a\ufffdb"


def test_local_run_of_missing_command_fails_naming_path():
    with pytest.raises(SubmitFailed, match="cannot start /nope on localhost: No such file"):
        LOCAL.run(HOST, ["/nope"])


def test_local_run_fails_when_command_exceeds_timeout():
    with pytest.raises(SubmitFailed, match=r"sleep on localhost did not end within 0\.05 s"):
        LOCAL.run(HOST, ["sleep", "60"], timeout=0.05)


def test_local_start_detaches_command_into_own_session(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = 'cut -d" " -f4,6 /proc/$$/stat >"$0.new"; echo "$A" >>"$0.new"; cat "$0.new" >"$0"'
    LOCAL.start(HOST, ["sh", "-c", script, str(fifo)], env={"A": "x;y $z"})
    ids, value = fifo.read_text().splitlines()  # waits for the writer
    parent, session = map(int, ids.split())
    assert parent != os.getpid()
    assert session != os.getsid(0)
    assert value == "x;y $z"


# ---------------------------------------------------------------- files


def test_local_put_creates_folders_and_sets_mode(weird_tmp_path):
    path = weird_tmp_path / "a" / "b c" / "f'g"
    LOCAL.put(HOST, str(path), b"\0data", 0o755)
    assert path.read_bytes() == b"\0data"
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert os.listdir(path.parent) == ["f'g"]


def test_local_put_mode_ignores_umask(tmp_path):
    before = os.umask(0o077)
    try:
        LOCAL.put(HOST, str(tmp_path / "f"), b"", 0o644)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o644


def test_local_put_replaces_file_atomically(tmp_path):
    (tmp_path / "f").write_bytes(b"old and long")
    with (tmp_path / "f").open("rb") as reader:
        LOCAL.put(HOST, str(tmp_path / "f"), b"new")
        assert reader.read() == b"old and long"
    assert (tmp_path / "f").read_bytes() == b"new"


def test_write_atomic_without_space_keeps_old_file(tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    real = os.fdopen

    class Full:
        def __init__(self, handle, mode):
            self._file = real(handle, mode)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._file.close()

        write = staticmethod(no_space)

    monkeypatch.setattr(os, "fdopen", Full)
    with pytest.raises(RunFolderError, match=f"cannot write {path}: No space left") as error:
        write_atomic(path, b"new")
    assert "make room on the disk" in (error.value.hint or "")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_local_put_on_full_disk_leaves_no_partial_file(tiny_disk):
    LOCAL.put(HOST, str(tiny_disk / "small"), b"fits")
    with pytest.raises(RunFolderError, match="No space left on device"):
        LOCAL.put(HOST, str(tiny_disk / "small"), b"x" * (128 << 10))
    with pytest.raises(RunFolderError, match="No space left on device"):
        LOCAL.put(HOST, str(tiny_disk / "big"), b"x" * (128 << 10))
    assert os.listdir(tiny_disk) == ["small"]
    assert (tiny_disk / "small").read_bytes() == b"fits"


def test_local_put_below_regular_file_fails(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(RunFolderError, match="cannot write"):
        LOCAL.put(HOST, str(tmp_path / "f" / "g"), b"")


# ---------------------------------------------------------------- ports


@pytest.fixture
def listener():
    """Listens on a port of the range that clusterkit draws from."""
    for port in PORTS:
        server = socket.socket()
        try:
            server.bind(("0.0.0.0", port))
        except OSError:
            server.close()
            continue
        server.listen()
        break
    yield server
    server.close()


def test_free_port_is_below_ephemeral_port_range():
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
    port = LOCAL.free_port(HOST)
    assert port in PORTS
    assert PORTS.stop <= first or first < 32768


def test_free_port_keeps_wanted_port_when_free(listener):
    free = LOCAL.free_port(HOST)
    assert LOCAL.free_port(HOST, free) == free


def test_free_port_replaces_wanted_port_when_taken(listener):
    taken = listener.getsockname()[1]
    other = LOCAL.free_port(HOST, taken)
    assert other != taken
    assert other in PORTS


def test_free_port_requires_next_port_to_be_free(monkeypatch):
    monkeypatch.setattr(host_probe, "PORTS", range(30000, 30200))
    monkeypatch.setattr(
        host_probe, "bind_error", lambda port: None if port % 7 in (3, 5, 6) else OSError()
    )
    assert {LOCAL.free_port(HOST) % 7 for _ in range(20)} == {5}


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_free_port_sees_listener_on_loopback_or_wildcard_address(address):
    with socket.socket() as server:
        server.bind((address, 0))
        server.listen()
        port = server.getsockname()[1]
        assert LOCAL.free_port(HOST, port) != port


def test_free_port_accepts_port_in_time_wait():
    with socket.create_server(("127.0.0.1", 0)) as store:  # as torch's: with SO_REUSEADDR
        port = store.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            store.accept()[0].close()  # first: its half goes through TIME_WAIT
            assert client.recv(1) == b""
    assert LOCAL.free_port(HOST, port) == port


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_free_port_sees_ipv6_only_listener():
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            server.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error.strerror}")
        server.listen()
        port = server.getsockname()[1]
        assert LOCAL.free_port(HOST, port) != port


def test_free_port_fails_when_no_port_is_free(monkeypatch):
    monkeypatch.setattr(host_probe, "bind_error", lambda port: OSError())
    with pytest.raises(SubmitFailed, match="no free TCP port between 20000 and 32000"):
        LOCAL.free_port(HOST, 20000)


def test_stream_reads_output_with_more_than_1024_open_files():
    with contextlib.ExitStack() as stack:
        files.allow_open_files(2000)
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        stream = stack.enter_context(LOCAL.open(HOST, ["echo", "here"]))
        assert stream._output.fileno() > 1024
        assert stream.read(60) == b"here\n"


# ---------------------------------------------------------------- the protocol


def test_local_transport_matches_protocol_method_signatures():
    wanted = {name for name in vars(Transport) if not name.startswith("_")}
    assert wanted == {"run", "open", "start", "put", "put_all", "free_port", "close"}
    for name in wanted:
        ours = inspect.signature(getattr(LocalTransport, name))
        assert ours == inspect.signature(getattr(Transport, name)), name


def test_write_atomic_follows_umask_unless_mode_is_given(tmp_path):
    before = os.umask(0o077)
    try:
        write_atomic(tmp_path / "report", b"")
        write_atomic(tmp_path / "script", b"", 0o755)
    finally:
        os.umask(before)
    assert (tmp_path / "report").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "script").stat().st_mode & 0o777 == 0o755
