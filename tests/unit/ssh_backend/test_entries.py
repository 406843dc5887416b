"""Entries of cluster files and options that choose hosts."""

import time
from pathlib import Path

import pytest

from clusterkit import api
from clusterkit.backends.ssh.hosts import choose_hosts
from clusterkit.cluster import Host, SshCluster
from clusterkit.errors import BadInput
from clusterkit.hosts.addresses import check_hosts
from tests.unit.ssh_backend.hosts import SSH


def write(path, text):
    path.write_text(text)
    return path


def resolved(tmp_path, **fields):
    options = {key: fields.pop(key, None) for key in ("include", "exclude")}
    return SSH.resolved(SshCluster(**fields), tmp_path, **options)


def test_resolved_entry_no_longer_needs_inventory_file(tmp_path):
    write(tmp_path / "hosts.yaml", "nodes: {hosts: {h0: , h1: {slots: 4}, h2: }}")
    found = resolved(tmp_path, inventory="hosts.yaml", group="nodes", exclude="h0@h2")
    assert found == SshCluster(hosts=(Host(name="h1", slots=4),))
    again = SSH.resolved(found, Path("/nowhere"), None, None)
    assert again == found


def test_include_and_exclude_flags_override_entry_include(tmp_path):
    write(tmp_path / "hosts", "h0 slots=2\nh1 slots=2\nh2 slots=2\n")
    entry = SshCluster(inventory="hosts", include="h0")
    for options, names in (
        ({"include": None, "exclude": None}, ["h0"]),
        ({"include": "h1:1", "exclude": None}, ["h1"]),
        ({"include": None, "exclude": "h0"}, ["h1", "h2"]),
    ):
        found = SSH.resolved(entry, tmp_path, options["include"], options["exclude"])
        assert [host.name for host in found.hosts] == names


def test_host_file_paths_resolve_relative_to_cluster_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    host = Host(name="h0", identity="keys/id", known_hosts="../known", ssh_config="~/config")
    found = resolved(tmp_path / "project", hosts=(host,))
    assert found.hosts == (
        Host(
            name="h0",
            identity=f"{tmp_path}/project/keys/id",
            known_hosts=f"{tmp_path}/known",
            ssh_config="/home/me/config",
        ),
    )
    assert SSH.resolved(found, Path("/nowhere"), None, None) == found


def test_inventory_path_accepts_tilde_and_absolute_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "hosts", "h0\n")
    for path in ("~/hosts", str(tmp_path / "hosts")):
        assert SSH.resolved(SshCluster(inventory=path), Path("/"), None, None).hosts


CLUSTERS = """\
lab:
  backend: ssh
  inventory: hosts.yaml
  group: nodes
{}
"""


@pytest.fixture
def entry(cwd):
    """Read one entry of a clusters.yaml whose text is given; gives the error's message."""

    def read(text, hosts="nodes: {hosts: {h0: , h1: {slots: 4}}}", **options):
        (cwd / "clusters.yaml").write_text(text)
        if hosts is not None:
            (cwd / "hosts.yaml").write_text(hosts)
        with pytest.raises(BadInput) as error:
            api.resolved_cluster("lab", **options)
        assert error.value.exit_code == 125
        return error.value.message.replace(f"{cwd}/", "")

    return read


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CLUSTERS.format("  include: h9"), "clusters.yaml:5: lab.include h9: host 'h9' is unknown"),
        (
            CLUSTERS.format("  exclude: h0@h1"),
            "clusters.yaml:5: lab.exclude h0@h1: no host is left",
        ),
        (
            CLUSTERS.format("  shared: nfs"),
            "clusters.yaml:5: lab.shared: nfs is not an absolute path",
        ),
        (CLUSTERS.format("  hosts: [{name: x}]"), "clusters.yaml:3: lab.inventory: a cluster has"),
        ("lab: {backend: ssh}", "clusters.yaml:1: lab.inventory: a cluster has either"),
        (CLUSTERS.format("  worker: x"), "clusters.yaml:5: lab.worker: unknown key (did you mean"),
        (CLUSTERS.format("  port: 99999"), "clusters.yaml:5: lab.port: 99999: "),
        (CLUSTERS.format("  sync: maybe"), "clusters.yaml:5: lab.sync: 'maybe' is text, not true"),
        (CLUSTERS.format("  connect_timeout: 0"), "clusters.yaml:5: lab.connect_timeout: 0: "),
        (
            CLUSTERS.format("  lost_after: .nan"),
            "clusters.yaml:5: lab.lost_after: nan is not a finite",
        ),
        (CLUSTERS.format("  workdir: ''"), "clusters.yaml:5: lab.workdir: "),
        (CLUSTERS.format("  env: {A=B: c}"), "clusters.yaml:5: lab.env: "),
        (
            "lab:\n  backend: ssh\n  hosts:\n  - name: a\n  - nam: b\n",
            "clusters.yaml:5: lab.hosts[1]",
        ),
        (
            "lab:\n  backend: ssh\n  hosts:\n  - name: a;id\n",
            "clusters.yaml:3: lab.hosts: host 'a;id': 'a;id' is neither a host name",
        ),
        (
            "lab:\n  backend: ssh\n  hosts: [{name: a}, {name: b, address: a}]\n",
            "clusters.yaml:3: lab.hosts: hosts a and b have the same address a",
        ),
        (
            "lab:\n  backend: ssh\n  hosts: [{name: a, port: 0}]\n",
            "clusters.yaml:3: lab.hosts[0].port: 0: ",
        ),
        (
            "lab:\n  backend: ssh\n  hosts:\n  - name: a\n    known_hosts: /dev/null\n",
            "clusters.yaml:5: lab.hosts[0].known_hosts: /dev/null holds no key, and a host's key",
        ),
        ("lab:\n  backend: shh\n", "clusters.yaml:2: lab.backend: 'shh' is not a backend"),
    ],
)
def test_invalid_cluster_entry_is_reported_with_file_line_and_key(entry, text, said):
    message = entry(text)
    assert message.startswith(said), message


def test_invalid_inventory_is_reported_with_inventory_file(entry):
    assert entry(CLUSTERS.format(""), "a: {hosts: {h0: }}") == (
        "hosts.yaml: there is no group 'nodes'"
    )
    assert entry(CLUSTERS.format(""), "nodes:\n  hosts: [h0]").startswith(
        "hosts.yaml:2: nodes.hosts: a mapping is needed"
    )
    assert entry(CLUSTERS.format(""), "") == "hosts.yaml: the file is empty"
    (Path.cwd() / "hosts.yaml").unlink()
    assert entry(CLUSTERS.format(""), None) == "hosts.yaml: no such file or directory"


def test_unknown_host_in_include_or_exclude_flag_names_flag(entry):
    for flag in ("include", "exclude"):
        message = entry(CLUSTERS.format("  include: h0"), **{flag: "h7"})
        assert message == f"--{flag} h7: host 'h7' is unknown"


@pytest.mark.parametrize(
    ("hosts", "options", "said"),
    [
        ("", (), "error: hosts.yaml: the file is empty"),
        ("all: {hosts", (), "error: hosts.yaml:1: not YAML"),
        ("a: {hosts: {h0: }}", (), "error: hosts.yaml: there is no group 'nodes'"),
        ("nodes: {hosts: {h0: }}", ("--nodes", "2"), "error: --nodes: 2 needed, the cluster"),
        ("nodes: {hosts: {h0: }}", ("--include", "h1"), "error: --include h1: host 'h1' is unkn"),
        ("nodes: {hosts: {h0: {ansible_password: x}}}", (), "error: hosts.yaml:1: host h0: ans"),
    ],
)
def test_submit_and_plan_refuse_bad_inventory_or_flags(
    write_job, refused, cwd, hosts, options, said
):
    name = write_job("launcher: forkserver\n")
    (cwd / "clusters.yaml").write_text(CLUSTERS.format(""))
    (cwd / "hosts.yaml").write_text(hosts)
    for verb in ("submit", "plan"):
        told = refused(verb, name, "--cluster", "lab", *options).replace(f"{cwd}/", "")
        assert told.startswith(said), told


def test_submit_reports_unreachable_host(write_job, refused, cwd, monkeypatch):
    name = write_job("launcher: forkserver\n")
    monkeypatch.setenv("HOME", str(cwd))
    host = f"{{name: h0, address: 127.0.0.1, port: 1, identity: {cwd}/gone}}"
    (cwd / "clusters.yaml").write_text(f"lab: {{backend: ssh, hosts: [{host}]}}")
    told = refused("submit", name, "--cluster", "lab")
    assert "host h0 (127.0.0.1 port 1) refuses connections on port 1" in told


def test_choose_hosts_handles_5000_hosts_within_2_s():
    hosts = [Host(name=f"h{n}", slots=8) for n in range(5000)]
    began = time.process_time()
    found = choose_hosts(hosts, None, "@".join(f"h{n}:0" for n in range(2500)))
    check_hosts(found, "hosts")
    assert len(found) == 5000
    assert time.process_time() - began < 2
