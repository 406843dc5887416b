"""OpenSSH's files, as OpenSSH reads them."""

import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterkit import api
from clusterkit.backends.ssh import inventory
from clusterkit.backends.ssh.config import (
    resolve,
)
from clusterkit.backends.ssh.transport import SshTransport
from clusterkit.cluster import Host
from clusterkit.errors import Unavailable
from clusterkit.run.status import State
from clusterkit.transport import Transport
from tests.unit.ssh.sshd import ME, OPENSSH, SSHD, configured

needs_sshd = pytest.mark.skipif(SSHD is None, reason="sshd is not installed")


# ---------------------------------------------------------------- configurations


CONFIG = """
Include conf.d/*.conf
Host alias
    HostName real.example.org
    Port 2222
    User trainer
    IdentityFile ~/.ssh/first-%u
    IdentityFile "~/.ssh/with space"
    IdentitiesOnly yes
    UserKnownHostsFile ~/.ssh/known_one "~/known two"
    HostKeyAlias the-alias
Host *.example.org !not.example.org
    User glob
    ProxyJump me@gate:22
Host noproxy
    ProxyJump none
Match host matched*
    User matched
Match host asked exec "true"
    User exec
Match host asked2 exec "false"
    User none
Host *
    User everyone
    Port 22
"""
INCLUDED = "Host included\n  Port 4444\n  User from-include\n"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("alias", ("real.example.org", 2222, "trainer", None)),
        ("a.example.org", ("a.example.org", 22, "glob", "me@gate:22")),
        ("not.example.org", ("not.example.org", 22, "everyone", None)),
        ("matched1", ("matched1", 22, "matched", None)),
        ("plain", ("plain", 22, "everyone", None)),
        ("included", ("included", 4444, "from-include", None)),
        ("asked", ("asked", 22, "exec", None)),
        ("asked2", ("asked2", 22, "everyone", None)),
        ("noproxy", ("noproxy", 22, "everyone", None)),
    ],
)
def test_resolve_applies_ssh_config_of_host(home, name, expected):
    (home / "one.conf").write_text(INCLUDED)
    configured(home, CONFIG.replace("conf.d/*.conf", f'"{home}/one.conf"'))
    ours = resolve(Host(name=name))
    assert (ours.address, ours.port, ours.user, ours.jump) == expected
    if name == "alias":
        assert ours.identities == (f"{home}/.ssh/first-{ME}", f"{home}/.ssh/with space")
        assert ours.default_identities == ()
        assert ours.identities_only
        assert ours.known_hosts[:2] == (f"{home}/.ssh/known_one", f"{home}/known two")
        assert ours.key_name == "the-alias"


DIFFERENCES = {
    "a comment behind a value": "Port 2201 # comment\n",
    "an unknown criterion": "Match tagged prod\n  User none\nMatch all\n  Port 1\n",
    "Include inside Host": "Host other\n  Include INCLUDED\nHost *\n  Port 2202\n",
    "ProxyCommand before ProxyJump": "ProxyCommand nc %h %p\nProxyJump gate\n",
    "Match user before User": f"Match user {ME}\n  Port 2203\nHost *\n  User later\n",
}
"""Where the parser that clusterkit had read otherwise than OpenSSH."""
WORDS = st.sampled_from(["a", "gpu1", "gpu*", "*", "!gpu1", "*.example.org", "me"])
OPTIONS = st.one_of(
    st.builds("{}{}{}{}".format, st.sampled_from(["Port", "port", "PORT"]),
              st.sampled_from([" ", "=", " = ", "\t"]), st.integers(1, 65535),
              st.sampled_from(["", " ", " # comment"])),
    st.builds("User {}".format, st.sampled_from(["me", '"you"', "root", "a.b"])),
    st.builds("HostName {}".format, st.sampled_from(["%h.example.org", "10.0.0.1", '"x"', "%h%%"])),
    st.sampled_from(["ProxyJump gate", "ProxyJump me@gate:2222,b", "ProxyJump none",
                     "ProxyCommand nc %h %p %r %n %%", "ProxyCommand none", "IdentitiesOnly yes",
                     "HostKeyAlias alias", "Include INCLUDED", "include=INCLUDED GONE",
                     "# a comment", ""]),
    st.builds('IdentityFile "~/.ssh/{}"'.format, st.sampled_from(["a", "b c", "%r@%h", "%n"])),
    st.sampled_from(["UserKnownHostsFile /k /l", 'UserKnownHostsFile "/k l" /m',
                     "UserKnownHostsFile /dev/null", "UserKnownHostsFile none"]),
)  # fmt: skip
BLOCKS = st.one_of(
    st.builds("Host {}".format, st.lists(WORDS, min_size=1, max_size=3).map(" ".join)),
    st.builds("Match {} {}".format,
              st.sampled_from(["user", "!user", "host", "originalhost", "localuser"]),
              st.sampled_from(["me", "root", "gpu1", "gpu*,!gpu1", "*"])),
    st.sampled_from(["Match all", 'Match exec "true"', 'Match exec "false" user me',
                     "Match final", "Match canonical all", "Match tagged x",
                     "Match frobnicate"]),
)  # fmt: skip
CONFIGS = st.lists(st.one_of(OPTIONS, OPTIONS, BLOCKS), max_size=12).map("\n".join)


def told_by_openssh(arguments):
    done = subprocess.run([OPENSSH, "-G", *arguments], capture_output=True, text=True)
    found = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    return None if done.returncode else found


@pytest.mark.parametrize("text", DIFFERENCES.values(), ids=list(DIFFERENCES))
def test_resolve_agrees_with_openssh_on_known_parser_differences(tmp_path, text):
    compare_with_openssh(tmp_path, text, "Host *\nPort 9\n", None, None)


@settings(max_examples=100)
@given(text=CONFIGS, included=CONFIGS.filter(lambda text: "nclude" not in text),
       user=st.sampled_from([None, "me"]), port=st.sampled_from([None, 2200]))  # fmt: skip
def test_resolve_agrees_with_openssh_on_any_ssh_config(
    tmp_path_factory, text, included, user, port
):
    compare_with_openssh(tmp_path_factory.mktemp("config"), text, included, user, port)


def compare_with_openssh(folder, text, included, user, port):
    (folder / "included").write_text(included)
    text = text.replace("INCLUDED", f"{folder}/included").replace("GONE", f"{folder}/gone")
    (file := folder / "config").write_text(text)
    options = ["-F", str(file), *(["-l", user] if user else [])]
    options += ["-p", str(port)] if port else []
    theirs = told_by_openssh([*options, "gpu1"])
    host = Host(name="gpu1", ssh_config=str(file), user=user, port=port)
    if theirs is None:
        with pytest.raises(Unavailable):
            resolve(host)
        return
    ours = resolve(host)
    tokens = {"%h": ours.address, "%p": f"{ours.port}", "%r": ours.user, "%n": "gpu1", "%%": "%"}

    def filled(value):
        return re.sub("%.", lambda match: tokens[match[0]], value)

    assert [ours.address, f"{ours.port}", ours.user] == [
        theirs[key][0] for key in ("hostname", "port", "user")
    ]
    assert ours.jump == next(iter(theirs.get("proxyjump", [None])))
    command = theirs.get("proxycommand", ["none"])[0]
    assert ours.proxy_command == (None if command == "none" else filled(command))
    home = pwd.getpwuid(os.getuid()).pw_dir  # as ssh has it, whatever HOME says
    keys = [filled(re.sub("^~", home, path)) for path in theirs["identityfile"] if path != "none"]
    assert list(ours.identities or ours.default_identities) == keys
    assert ours.identities_only == (theirs["identitiesonly"] == ["yes"])
    known = " ".join(ours.known_hosts)
    if theirs["userknownhostsfile"] not in (["/dev/null"], ["none"]):
        assert known.startswith(theirs["userknownhostsfile"][0])
    if "hostkeyalias" in theirs:
        assert ours.key_name == theirs["hostkeyalias"][0]


def test_resolve_refuses_recursive_include(home):
    configured(home, "Include config\n")
    with pytest.raises(Unavailable, match="Too many recursive configuration includes"):
        resolve(Host(name="h0"))


def test_inventory_settings_override_ssh_config(home):
    configured(home, CONFIG)
    target = resolve(
        Host(name="h0", address="alias", port=1, user="me", identity="/k", known_hosts="/a b/known",
             jump="gate")
    )  # fmt: skip
    assert target.address == "real.example.org"
    assert (target.port, target.user, target.jump) == (1, "me", "gate")
    assert target.identities == ("/k",)
    assert target.known_hosts[0] == "/a b/known"
    assert str(target) == "host h0 (real.example.org port 1)"


def test_resolve_without_ssh_config_uses_openssh_defaults(home):
    target = resolve(Host(name="h0"))
    assert (target.address, target.port, target.user) == ("h0", 22, ME)
    assert target.known_hosts == (
        f"{home}/.ssh/known_hosts", f"{home}/.ssh/known_hosts2",
        "/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2",
    )  # fmt: skip
    assert str(target) == "host h0"
    assert resolve(Host(name="h1", port=2200)).key_name == "[h1]:2200"


def test_resolve_takes_home_from_user_database_not_environment(home, tmp_path, monkeypatch):
    """As for ssh: HOME does not count."""
    configured(home, "Host h0\n  IdentityFile ~/.ssh/mine\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    target = resolve(Host(name="h0"))
    assert target.identities == (f"{home}/.ssh/mine",)
    assert target.known_hosts[0] == f"{home}/.ssh/known_hosts"


@pytest.mark.parametrize("why", ["`ssh` is not in PATH", "refuses uid"])
def test_resolve_refuses_ssh_config_when_openssh_cannot_run(home, monkeypatch, request, why):
    if "PATH" in why:
        monkeypatch.setenv("PATH", str(home))
    else:
        request.getfixturevalue("nameless")
    target = resolve(Host(name="h0", user="me"))
    assert (target.address, target.port, target.user) == ("h0", 22, "me")
    assert target.default_identities[0] == f"{home}/.ssh/id_ed25519"
    assert target.known_hosts[0] == f"{home}/.ssh/known_hosts"
    configured(home, "Host h0\n  Port 2222\n")
    with pytest.raises(
        Unavailable, match=f"config: only OpenSSH's .* can read it, .*{why}"
    ) as told:
        resolve(Host(name="h0", user="me"))
    assert "openssh-client" in (told.value.hint or "")
    assert resolve(Host(name="h0", user="me", ssh_config=os.devnull)).port == 22


def test_resolve_keeps_known_hosts_when_ssh_config_disables_checking(home):
    configured(home, "UserKnownHostsFile /dev/null\nStrictHostKeyChecking no\n")
    assert resolve(Host(name="h0")).known_hosts[0] == f"{home}/.ssh/known_hosts"


def test_inventory_jump_none_disables_proxy_jump(home):
    configured(home, "Host *\n  ProxyJump gate\n")
    assert resolve(Host(name="h0")).jump == "gate"
    assert resolve(Host(name="h0", jump="none")).jump is None


def test_proxy_command_receives_inventory_port_and_user(home):
    configured(home, "Host *\n  ProxyCommand nc %h %p %r\n  User other\n")
    target = resolve(Host(name="h0", address="10.0.0.1", port=2222, user="me"))
    assert target.proxy_command == "nc 10.0.0.1 2222 me"
    assert resolve(Host(name="h0", jump="gate")).proxy_command is None


@pytest.mark.parametrize(
    "text",
    [
        *("Port abc\n", "Port 70000\n", "Port 0\n", "Port ²\n", "Port -1\n", "nonsense\n"),
        *("Match\n User x\n", "Match frobnicate\n User x\n", "Nonsense yes\n"),
        b"\xff\xfe",
    ],
)
def test_resolve_refuses_invalid_ssh_config(home, text):
    path = home / ".ssh" / "config"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(Unavailable) as error:
        resolve(Host(name="h0"))
    assert "config" in f"{error.value}"


def test_resolve_uses_ssh_config_file_of_inventory(home, tmp_path):
    mine = tmp_path / "my config"
    mine.write_text("Host h0\n  User me\n")
    configured(home, "Host h0\n  User other\n")
    assert resolve(Host(name="h0", ssh_config=str(mine))).user == "me"
    assert resolve(Host(name="h0", ssh_config=os.devnull)).user == ME
    with pytest.raises(Unavailable, match="gone: No such file or directory"):
        resolve(Host(name="h0", ssh_config=str(tmp_path / "gone")))


def test_inventory_variables_alone_connect_to_host(sshd, home, tmp_path):
    """From an inventory's words to a connection, a folder with spaces included."""
    folder = tmp_path / "my inventory"
    folder.mkdir()
    shutil.copy(sshd.key, folder / "id")
    shutil.copy(sshd.known_hosts, folder / "known hosts")
    path = folder / "inventory.yaml"
    path.write_text(
        f"""
all:
  vars:
    ansible_user: {ME}
    ansible_ssh_private_key_file: "{{{{ inventory_dir }}}}/id"
    ansible_ssh_common_args: -o UserKnownHostsFile='"{folder}/known hosts"' -o IdentitiesOnly=yes
  hosts:
    h0: {{ansible_host: 127.0.0.1, ansible_port: {sshd.port}}}
"""
    )
    transport = SshTransport(inventory.read_hosts(path, "all"), connect_timeout=20)
    assert transport.run("h0", ["echo", "in"]).stdout == "in\n"
    transport.close()


def test_ssh_run_succeeds_in_workdir_with_spaces(sshd, home, tmp_path, cwd, write_job, no_gpus):
    name = write_job('launcher: forkserver\ngpus_per_node: 2\nenv: {ODD: "it\'s $HOME"}\n')
    (cwd / "train.py").write_text(
        "import os\nfrom helper import x\n"
        "print(os.environ['RANK'], os.environ['ODD'], os.getcwd(), x)\n"
    )
    (cwd / "helper.py").write_text("x = 'uncommitted'\n")
    work = tmp_path / "my work's folder"
    host = {
        "name": "h0", "address": "127.0.0.1", "port": sshd.port, "identity": str(sshd.key),
        "known_hosts": str(sshd.known_hosts),
    }  # fmt: skip
    entry = {"backend": "ssh", "hosts": [host], "workdir": str(work), "python": sys.executable}
    (cwd / "clusters.yaml").write_text(json.dumps({"lab": entry}))
    run = api.submit(name, cluster="lab")
    try:
        status = run.wait(120)
    finally:
        run.cancel()
    assert status.state is State.SUCCEEDED, status
    (tree,) = run.plan.trees[:1]
    assert tree.path.startswith(f"{work}/projects/")
    assert sorted(line.text for line in run.logs()) == [
        f"{rank} it's $HOME {tree.path} uncommitted" for rank in range(2)
    ]
    assert (work / "runs" / run.id / "files" / "node.sh").is_file()


# ---------------------------------------------------------------- the protocol


def test_ssh_transport_matches_protocol_method_signatures():
    import inspect

    wanted = {name for name in vars(Transport) if not name.startswith("_")}
    for name in wanted:
        ours = inspect.signature(getattr(SshTransport, name))
        assert ours == inspect.signature(getattr(Transport, name)), name


USED = """
import contextlib, logging, sys
{first}
def state():
    kept = {{m: dict(vars(sys.modules[m])) for m in sorted(sys.modules)
            if m.partition(".")[0] in ("paramiko", "invoke")}}
    return kept | {{"logging": {{
        name: (logger.propagate, logger.level, *logger.handlers)
        for name in ("paramiko", "paramiko.transport") for logger in [logging.getLogger(name)]
    }}}}
before = state()
from clusterkit.cluster import Host
from clusterkit.backends.ssh.transport import SshTransport, resolve
assert resolve(Host(name="asked")).user == "exec"
host = Host(**{host!r})
transport = SshTransport([host], python=sys.executable, connect_timeout=20)
with contextlib.closing(transport):
    assert transport.run("h0", ["echo", "hello"]).stdout == "hello\\n"
import paramiko.config, invoke
assert paramiko.config.invoke is invoke
after = state()
print([(name, key) for name in before for key in before[name] | after[name]
       if before[name].get(key) != after[name].get(key)])
"""


@needs_sshd
@pytest.mark.parametrize("first", ["import paramiko.config, invoke", ""])
def test_ssh_transport_leaves_paramiko_and_logging_unchanged(sshd, home, first):
    configured(home, CONFIG)
    host = {key: value for key, value in msgspec.structs.asdict(sshd.host()).items() if value}
    code = USED.format(first=first, host=host)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_paramiko_thread_traceback_is_not_printed(home):
    """A server that is none: paramiko's own thread logs a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
import contextlib
from clusterkit.cluster import Host
from clusterkit.backends.ssh.transport import HostUnreachable, SshTransport
host = Host(name="h0", address="127.0.0.1", port={server.getsockname()[1]})
with contextlib.closing(SshTransport([host], python="python3", connect_timeout=20)) as transport:
    try:
        transport.run("h0", ["true"])
    except HostUnreachable:
        print("refused")
"""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
        with process, server.accept()[0] as connection:
            connection.sendall(b"SSH-1.0-none\r\n")
            assert process.communicate() == ("refused\n", "")
