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


def test_a_command_runs_to_its_end_and_tells_all_it_said():
    done = LOCAL.run(HOST, ["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.exit_code, done.stdout, done.stderr) == (3, "out\n", "err\n")
    assert done.argv == ("sh", "-c", "echo out; echo err >&2; exit 3")


def test_environment_is_added_to_ours(monkeypatch):
    monkeypatch.setenv("OURS", "1")
    assert LOCAL.run(HOST, ["printenv", "OURS", "A"], env={"A": "x y"}).stdout == "1\nx y\n"


def test_environment_values_reach_a_command_unchanged(ugly_values):
    code = "import os; print(ascii({k: v for k, v in os.environ.items() if k in %r}))"
    done = LOCAL.run(
        HOST, [sys.executable, "-S", "-c", code % sorted(ugly_values)], env=ugly_values
    )
    assert ast.literal_eval(done.stdout) == ugly_values


def test_bytes_that_are_no_text_do_not_hurt():
    assert LOCAL.run(HOST, ["printf", r"a\377b"]).stdout == "a\ufffdb"


def test_a_command_that_is_not_there_cannot_be_started():
    with pytest.raises(SubmitFailed, match="cannot start /nope on localhost: No such file"):
        LOCAL.run(HOST, ["/nope"])


def test_a_command_that_does_not_end_in_time_is_ended():
    with pytest.raises(SubmitFailed, match=r"sleep on localhost did not end within 0\.05 s"):
        LOCAL.run(HOST, ["sleep", "60"], timeout=0.05)


def test_a_started_command_lives_in_a_session_of_its_own_and_is_nobody_s_child(tmp_path):
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


def test_a_file_is_written_with_its_folders_its_mode_and_nothing_beside_it(weird_tmp_path):
    path = weird_tmp_path / "a" / "b c" / "f'g"
    LOCAL.put(HOST, str(path), b"\0data", 0o755)
    assert path.read_bytes() == b"\0data"
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert os.listdir(path.parent) == ["f'g"]


def test_the_mode_does_not_depend_on_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        LOCAL.put(HOST, str(tmp_path / "f"), b"", 0o644)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o644


def test_a_file_is_replaced_whole(tmp_path):
    (tmp_path / "f").write_bytes(b"old and long")
    with (tmp_path / "f").open("rb") as reader:
        LOCAL.put(HOST, str(tmp_path / "f"), b"new")
        assert reader.read() == b"old and long"
    assert (tmp_path / "f").read_bytes() == b"new"


def test_a_full_disk_leaves_the_old_file_and_no_half_of_the_new_one(tmp_path, monkeypatch):
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


def test_a_really_full_disk_leaves_nothing_behind(tiny_disk):
    LOCAL.put(HOST, str(tiny_disk / "small"), b"fits")
    with pytest.raises(RunFolderError, match="No space left on device"):
        LOCAL.put(HOST, str(tiny_disk / "small"), b"x" * (128 << 10))
    with pytest.raises(RunFolderError, match="No space left on device"):
        LOCAL.put(HOST, str(tiny_disk / "big"), b"x" * (128 << 10))
    assert os.listdir(tiny_disk) == ["small"]
    assert (tiny_disk / "small").read_bytes() == b"fits"


def test_a_folder_that_is_a_file_cannot_be_written_into(tmp_path):
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


def test_a_free_port_is_below_the_ports_of_outgoing_connections():
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
    port = LOCAL.free_port(HOST)
    assert port in PORTS
    assert PORTS.stop <= first or first < 32768


def test_a_wanted_port_is_kept_while_it_is_free(listener):
    free = LOCAL.free_port(HOST)
    assert LOCAL.free_port(HOST, free) == free


def test_a_wanted_port_that_is_taken_gives_another(listener):
    taken = listener.getsockname()[1]
    other = LOCAL.free_port(HOST, taken)
    assert other != taken
    assert other in PORTS


def test_the_port_after_a_chosen_one_is_free_as_well(monkeypatch):
    monkeypatch.setattr(host_probe, "PORTS", range(30000, 30200))
    monkeypatch.setattr(
        host_probe, "bind_error", lambda port: None if port % 7 in (3, 5, 6) else OSError()
    )
    assert {LOCAL.free_port(HOST) % 7 for _ in range(20)} == {5}


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_is_taken_whatever_address_somebody_listens_on(address):
    with socket.socket() as server:
        server.bind((address, 0))
        server.listen()
        port = server.getsockname()[1]
        assert LOCAL.free_port(HOST, port) != port


def test_a_port_whose_connections_have_just_ended_is_free():
    with socket.create_server(("127.0.0.1", 0)) as store:  # as torch's: with SO_REUSEADDR
        port = store.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            store.accept()[0].close()  # first: its half goes through TIME_WAIT
            assert client.recv(1) == b""
    assert LOCAL.free_port(HOST, port) == port


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_a_port_is_taken_by_a_listener_on_ipv6_alone():
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            server.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error.strerror}")
        server.listen()
        port = server.getsockname()[1]
        assert LOCAL.free_port(HOST, port) != port


def test_without_any_free_port_it_says_so(monkeypatch):
    monkeypatch.setattr(host_probe, "bind_error", lambda port: OSError())
    with pytest.raises(SubmitFailed, match="no free TCP port between 20000 and 32000"):
        LOCAL.free_port(HOST, 20000)


def test_output_is_read_where_more_than_1024_files_are_open():
    with contextlib.ExitStack() as stack:
        files.allow_open_files(2000)
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        stream = stack.enter_context(LOCAL.open(HOST, ["echo", "here"]))
        assert stream._output.fileno() > 1024
        assert stream.read(60) == b"here\n"


# ---------------------------------------------------------------- the protocol


def test_the_local_transport_has_exactly_the_methods_of_the_protocol():
    wanted = {name for name in vars(Transport) if not name.startswith("_")}
    assert wanted == {"run", "open", "start", "put", "put_all", "free_port", "close"}
    for name in wanted:
        ours = inspect.signature(getattr(LocalTransport, name))
        assert ours == inspect.signature(getattr(Transport, name)), name


def test_a_file_follows_the_umask_unless_its_mode_is_given(tmp_path):
    before = os.umask(0o077)
    try:
        write_atomic(tmp_path / "report", b"")
        write_atomic(tmp_path / "script", b"", 0o755)
    finally:
        os.umask(before)
    assert (tmp_path / "report").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "script").stat().st_mode & 0o777 == 0o755
