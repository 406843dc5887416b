"""Variables of a host, and its arguments for ssh."""

import json
import os

import pytest

from clusterkit.backends.ssh.inventory import read_hosts
from clusterkit.backends.ssh.variables import SECRETS
from clusterkit.cluster import Host
from tests.unit.inventory.reading import refusal


def one(write, line, **more):
    """The only host of an inventory that gives it these variables."""
    (host,) = read_hosts(write(f"all: {{hosts: {{h0: {{{line}}}}}}}"), more.get("group", "all"))
    return host


# ---------------------------------------------------------------- variables of a host


def test_host_takes_every_supported_variable(write, tmp_path):
    host = one(
        write,
        "ansible_host: 10.0.0.1, ansible_port: 2222, ansible_user: me, slots: 8, "
        "ansible_ssh_private_key_file: keys/id, clusterkit_python: /opt/venv/bin/python, "
        "clusterkit_address: 192.168.0.1, clusterkit_devices: [2, 0], anything: else",
    )
    assert host == Host(
        name="h0", address="10.0.0.1", port=2222, user="me", slots=8, devices=(2, 0),
        identity=str(tmp_path / "keys/id"), python="/opt/venv/bin/python",
        cluster_address="192.168.0.1",
    )  # fmt: skip


def test_host_takes_legacy_ansible_variable_names(write, tmp_path):
    host = one(
        write,
        "ansible_ssh_host: 10.0.0.1, ansible_ssh_port: 2222, ansible_ssh_user: me, "
        "ansible_private_key_file: /k",
    )
    assert host == Host(name="h0", address="10.0.0.1", port=2222, user="me", identity="/k")


@pytest.mark.parametrize("key", sorted(SECRETS))
def test_secret_variable_is_refused_without_printing_value(write, key):
    message, hint = refusal(write, f"all: {{hosts: {{h0: {{{key}: hunter2}}}}}}")
    assert f"host h0: {key}: clusterkit takes no" in message
    assert "hunter2" not in message + hint


@pytest.mark.parametrize("connection", ["local", "docker", "winrm", "community.docker.nsenter"])
def test_connection_other_than_ssh_is_refused(write, connection):
    message, _ = refusal(write, f"all: {{hosts: {{h0: {{ansible_connection: {connection}}}}}}}")
    assert message == f":1: host h0: ansible_connection: {connection!r}: only SSH reaches a node"


@pytest.mark.parametrize("connection", ["ssh", "smart", "ansible.builtin.ssh"])
def test_ssh_connection_plugins_are_accepted(write, connection):
    assert one(write, f"ansible_connection: {connection}") == Host(name="h0")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        *[(f"ansible_port: {v}", "ansible_port") for v in ("0", "65536", "abc", "-1", "²", "22.0")],
        *[(f"slots: {v}", "slots") for v in ("0", "-2", "many", "true", "1.5", "[8]", "1e3", "٣x")],
        ("ansible_host: {a: b}", "ansible_host"),
        ("ansible_user: [me]", "ansible_user"),
        *[
            (f"clusterkit_devices: {v}", "clusterkit_devices")
            for v in (
                "[]",
                "[0, -1]",
                "all",
                "[0, 0]",
                '"0,"',
                "{0: 1}",
                "[true]",
                "[0.5]",
                '"0;1"',
            )
        ],
        ('ansible_ssh_common_args: "-o Port=abc"', "ssh port"),
        ('ansible_ssh_common_args: "-p 70000"', "ssh port"),
        ("ansible_ssh_common_args: '-o \"x'", "ansible_ssh_common_args"),
    ],
)
def test_invalid_variable_value_is_refused_naming_host_and_variable(write, line, key):
    message, _ = refusal(write, f"all: {{hosts: {{h0: {{{line}}}}}}}")
    assert message.startswith(f":1: host h0: {key}: "), message


@pytest.mark.parametrize(
    ("written", "devices"), [("[3, 1]", (3, 1)), ('"0,2"', (0, 2)), ("1", (1,)), ("['0']", (0,))]
)
def test_clusterkit_devices_set_devices_and_slots(write, written, devices):
    host = one(write, f"clusterkit_devices: {written}")
    assert (host.devices, host.slots) == (devices, len(devices))


def test_inventory_dir_and_inventory_hostname_templates_are_filled_in(write, tmp_path):
    host = one(
        write,
        "ansible_ssh_private_key_file: '{{ inventory_dir }}/id', "
        "ansible_host: '{{inventory_hostname}}.example.org'",
    )
    assert (host.identity, host.address) == (str(tmp_path / "id"), "h0.example.org")


@pytest.mark.parametrize("value", ["{{ ip }}", "{{ inventory_dir | basename }}", "{% if x %}a"])
def test_unsupported_templates_are_refused(write, value):
    message, hint = refusal(write, f"all: {{hosts: {{h0: {{ansible_host: '{value}', ip: x}}}}}}")
    assert "is a template, which only a playbook can fill in" in message
    assert "inventory_dir" in hint


def test_templates_in_unused_variables_are_ignored(write):
    assert one(write, "greeting: '{{ hello }}'") == Host(name="h0")


def test_private_key_path_is_relative_to_inventory_folder_or_home(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for written, found in (
        ("id", f"{tmp_path}/id"),
        ("../id", f"{tmp_path.parent}/id"),
        ("/k/id", "/k/id"),
        ("~/.ssh/id", "/home/me/.ssh/id"),
        ("~nobody-of-this-name/id", f"{tmp_path}/~nobody-of-this-name/id"),
    ):
        assert one(write, f"ansible_ssh_private_key_file: {written}").identity == found


# ---------------------------------------------------------------- arguments for ssh


def with_arguments(write, arguments, more=""):
    return one(write, f"ansible_ssh_common_args: {json.dumps(arguments)}{more}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("-F /etc/my_ssh", {"ssh_config": "/etc/my_ssh"}),
        ("-F/etc/my_ssh", {"ssh_config": "/etc/my_ssh"}),
        ("-F none", {"ssh_config": os.devnull}),
        ("-i /k -p 2222 -l me", {"identity": "/k", "port": 2222, "user": "me"}),
        ("-p2222 -lme -Jgate", {"port": 2222, "user": "me", "jump": "gate"}),
        ("-J a@g1:22,b@g2", {"jump": "a@g1:22,b@g2"}),
        ("-o Port=2222", {"port": 2222}),
        ("-oPort=2222", {"port": 2222}),
        ("-o 'Port 2222'", {"port": 2222}),
        ("-o 'Port = 2222'", {"port": 2222}),
        ("-o PORT=2222", {"port": 2222}),
        ("-o Port=1 -o Port=2", {"port": 1}),
        ("-o HostName=10.0.0.9 -o User=me", {"address": "10.0.0.9", "user": "me"}),
        ("-o UserKnownHostsFile='/a b/known'", {"known_hosts": "/a b/known"}),
        ('-o \'UserKnownHostsFile="/a b/known"\'', {"known_hosts": "/a b/known"}),
        ("-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null", {}),
        ("-o ProxyJump=gate", {"jump": "gate"}),
        ("-o ProxyCommand=none", {}),
        # Nothing of these says how to reach a host; their values are no options either.
        ("-C -c aes128-ctr -S -F -L -i -b -p -vvv -A", {}),
        ("", {}),
    ],
)  # fmt: skip
def test_ssh_arguments_set_host_fields(write, arguments, expected):
    assert with_arguments(write, arguments) == Host(name="h0", **expected)


def test_host_variables_take_precedence_over_ssh_arguments(write):
    host = one(
        write,
        "ansible_port: 1, ansible_user: me, ansible_host: a, ansible_ssh_private_key_file: /k, "
        "ansible_ssh_common_args: '-p 2 -l you -o HostName=b -i /l'",
    )
    assert host == Host(name="h0", port=1, user="me", address="a", identity="/k")


def test_ssh_arguments_of_all_three_variables_are_merged(write):
    host = one(
        write,
        "ansible_ssh_args: '-p 1 -C', ansible_ssh_common_args: '-p 2 -l me', "
        "ansible_ssh_extra_args: '-l you -J gate'",
    )
    assert host == Host(name="h0", port=1, user="me", jump="gate")


@pytest.mark.parametrize(
    "command",
    [
        "nc -X 5 -x proxy:1080 %h %p",
        "ssh gate nc %h %p",
        "ssh -W %h:22 gate",
        "ssh -W %h:%p gate",
        "ssh -i /other -W %h:%p gate",
        "ssh -F /other -W %h:%p gate",
        "ssh -W %h:%p gate 'x",
        "cloudflared access ssh --hostname %h",
    ],
)
def test_proxy_command_is_refused_with_jump_hint(write, command):
    arguments = json.dumps(f'-o ProxyCommand="{command}"')
    message, hint = refusal(
        write, f"all: {{hosts: {{h0: {{ansible_ssh_common_args: {arguments}}}}}}}"
    )
    assert "ProxyCommand" in message
    assert "is not read here" in message
    assert "-J" in hint
