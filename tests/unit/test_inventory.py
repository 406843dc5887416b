"""Hosts from Ansible inventories and DeepSpeed hostfiles; Ansible itself says what is right."""

import ast
import collections
import copy
import importlib.util
import json
import logging
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterkit.backends.ssh import inventory
from clusterkit.backends.ssh.hosts import choose_hosts
from clusterkit.backends.ssh.inventory import read_hosts
from clusterkit.backends.ssh.variables import SECRETS, host_of
from clusterkit.cluster import Host
from clusterkit.errors import BadInput, Unavailable
from clusterkit.hosts.addresses import check_hosts

TOOL = Path(sys.executable).with_name("ansible-inventory")


@pytest.fixture
def write(tmp_path):
    """Write an inventory; gives its path."""

    def write(text, name="inventory.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def names(hosts):
    return [host.name for host in hosts]


def one(write, line, **more):
    """The only host of an inventory that gives it these variables."""
    (host,) = read_hosts(write(f"all: {{hosts: {{h0: {{{line}}}}}}}"), more.get("group", "all"))
    return host


def refusal(write, text, group="all", name="inventory.yaml"):
    path = write(text, name)
    with pytest.raises(BadInput) as error:
        read_hosts(path, group)
    assert error.value.message.startswith(str(path))
    return error.value.message.removeprefix(str(path)), error.value.hint or ""


# ---------------------------------------------------------------- as Ansible reads it


@pytest.fixture
def ansible(tmp_path):
    """What ``ansible-inventory`` says of a file."""
    assert TOOL.exists(), "these tests compare with Ansible: pip install ansible-core"

    def ask(path, *arguments):
        done = subprocess.run(
            [TOOL, "-i", path, *arguments], capture_output=True, cwd=tmp_path,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    return ask


def as_ansible(path, hostvars, hosts):
    return {name: host_of(str(path), name, hostvars.get(name, {})) for name in hosts}


NESTED = """
all:
  vars: {ansible_user: everyone, ansible_port: 1, slots: 1}
  hosts:
    lone: {ansible_host: 10.9.9.9}
    a[01:03]: {clusterkit_python: /usr/bin/python3}
    "a03": {ansible_host: 10.0.0.33}
  children:
    racks:
      vars: {ansible_user: racks, slots: 2}
      children:
        rack1:
          hosts: {a01: , a02: {slots: 7}}
          vars: {ansible_user: rack1}
        rack2:
          hosts: {a03: {ansible_port: 33}, "b[1:2]:2222": {ansible_host: "b.example"}, b2: {ansible_host: c}}
    fast:
      vars: {ansible_user: fast, clusterkit_address: 1.2.3.4, ansible_group_priority: 9}
      hosts: {a01: , b1: }
    slow:
      vars: {ansible_user: slow, clusterkit_address: 5.6.7.8}
      hosts: {a01: , b1: }
      children: {rack1: }
"""  # noqa: E501


def test_nested_groups_ranges_ports_and_precedence_match_ansible(write, ansible):
    path = write(NESTED)
    listing = ansible(path, "--list")
    found = {host.name: host for host in read_hosts(path, "all")}
    assert found == as_ansible(path, listing["_meta"]["hostvars"], found)
    assert found["b1"].port == 2222
    assert list(found) == ["lone", "a01", "a02", "a03", "b1", "b2"]
    assert names(read_hosts(path, "rack2")) == listing["rack2"]["hosts"] == ["a03", "b1", "b2"]
    assert names(read_hosts(path, "racks")) == ["a01", "a02", "a03", "b1", "b2"]
    assert names(read_hosts(path, "fast")) == ["a01", "b1"]


def test_host_variables_match_ansible_inventory_host_output(write, ansible):
    path = write(NESTED)
    (host,) = (host for host in read_hosts(path, "slow") if host.name == "a01")
    assert host == host_of(str(path), "a01", ansible(path, "--host", "a01"))
    assert (host.user, host.cluster_address, host.slots) == ("rack1", "1.2.3.4", 2)


RANDOM_READER = """
import json, sys
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.vars.manager import VariableManager
for path in sys.argv[1:]:
    loader = DataLoader()
    inventory = InventoryManager(loader, sources=[path])
    variables = VariableManager(loader, inventory)
    told = {
        "vars": {
            host.name: {
                k: v for k, v in variables.get_vars(host=host, include_hostvars=False).items()
                if k.startswith(("ansible_", "clusterkit_", "slots")) and k in sys.stdin.wanted
            }
            for host in inventory.get_hosts("all")
        },
        "groups": {n: [h.name for h in g.get_hosts()] for n, g in inventory.groups.items()},
    }
    print(json.dumps(told))
"""
COMPARED = {
    "ansible_user": lambda n: f"u{n}",
    "ansible_port": lambda n: n + 1,
    "ansible_host": lambda n: f"10.0.{n}.{n}",
    "slots": lambda n: n + 1,
    "clusterkit_python": lambda n: f"/opt/{n}/python",
}


def random_inventory(dice):
    """Plain but now and then: groups at the top and below `all`, in any order of keys."""
    groups = [f"g{number}" for number in range(dice.randint(1, 5))]
    counter = iter(range(1, 250))
    left = ["h1", "h2", "h3", "n1", "n02", "xa", "m0", "h4:2200"]
    dice.shuffle(left)
    every = [*left]

    def variables(most):
        names = dice.sample(sorted(COMPARED), dice.randint(0, most))
        return {name: COMPARED[name](next(counter)) for name in names}

    def hosts(of):
        return {pattern: variables(3) or None for pattern in of}

    def group(name):
        taken = [left.pop() for _ in range(dice.randint(0, min(3, len(left))))]
        keys = {"hosts": hosts(taken), "vars": variables(3)}
        if dice.random() < 0.05:  # no longer plain
            keys["children"] = {f"{name}below": {"hosts": hosts(dice.sample(every, 1))}}
        if dice.random() < 0.05:
            keys["hosts"] |= hosts(dice.sample(every, 1))
        kept = [key for key in keys if keys[key] or dice.random() < 0.1]
        dice.shuffle(kept)
        return {key: keys[key] for key in kept} or None

    document = {name: group(name) for name in groups}
    whole = {"vars": variables(4), "hosts": hosts(dice.sample(every, dice.randint(0, 3)))}
    whole["children"] = {
        name: document.pop(name) if dice.random() < 0.7 else None
        for name in groups
        if dice.random() < 0.5
    }
    keys = dice.sample(sorted(whole), len(whole))
    document["all"] = {key: whole[key] for key in keys}
    return {name: document[name] for name in dice.sample(sorted(document), len(document))}


def test_random_inventories_match_ansible_or_are_left_to_ansible(write, tmp_path, monkeypatch):
    # Two hosts may have drawn one address: not what is compared here.
    monkeypatch.setattr(inventory, "check_hosts", lambda hosts, *_: tuple(hosts))

    class LeftToAnsible(Exception):
        pass

    def left_to_ansible(*_):
        raise LeftToAnsible

    monkeypatch.setattr(inventory, "_by_ansible", left_to_ansible)
    seed = random.randrange(1 << 32)
    dice = random.Random(seed)
    paths = [write(json.dumps(random_inventory(dice)), f"{n}.yaml") for n in range(100)]
    reader = RANDOM_READER.replace("sys.stdin.wanted", repr(set(COMPARED)))
    done = subprocess.run(
        [sys.executable, "-c", reader, *paths], capture_output=True, cwd=tmp_path,
        env={**os.environ, "LC_ALL": "C.UTF-8"}, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(paths)
    compared = left = 0
    for path, theirs in zip(paths, told, strict=True):
        about = f"seed {seed}: {path.read_text()}"
        for group, members in theirs["groups"].items():
            if group == "ungrouped":
                continue
            try:
                found = {host.name: host for host in read_hosts(path, group)}
            except LeftToAnsible:
                left += 1
                continue
            except BadInput:
                assert not members, about
                continue
            assert sorted(found) == sorted(members), about
            assert found == as_ansible(path, theirs["vars"], found), about
            compared += len(found)
    assert compared > 300, seed
    assert left > 0, seed


INI = """
; a comment
first
[zeta]
h3 ansible_port=2200
h1 ansible_host=10.0.0.1 slots=3
[alpha]
h[1:2]  # and a comment
[both:children]
zeta
alpha
[both:vars]
ansible_user=trainer
"""


def test_ini_inventory_keeps_host_order_of_file(write):
    hosts = read_hosts(write(INI, "hosts"), "all")
    assert hosts == (
        Host(name="first"),
        Host(name="h3", port=2200, user="trainer"),
        Host(name="h1", address="10.0.0.1", slots=3, user="trainer"),
        Host(name="h2", user="trainer"),
    )


def test_ini_inventory_group_selects_its_hosts(write):
    assert names(read_hosts(write(INI, "hosts"), "alpha")) == ["h1", "h2"]


def test_group_vars_and_host_vars_beside_inventory_apply(write, tmp_path):
    path = write("nodes: {hosts: {h0: , h1: }}")
    for folder, name, text in (
        ("group_vars", "nodes.yml", "ansible_user: from_group\nslots: 2"),
        ("host_vars", "h1.yml", "ansible_user: from_host"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    assert read_hosts(path, "nodes") == (
        Host(name="h0", user="from_group", slots=2),
        Host(name="h1", user="from_host", slots=2),
    )


def test_executable_inventory_script_lists_hosts(write, monkeypatch):
    # Ansible refuses to start under this locale; it is not the user's to know.
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("ANSIBLE_INVENTORY_EXPORT", "true")
    listing = {
        "nodes": {"hosts": ["s1", "s0"], "vars": {"ansible_user": "u"}},
        "_meta": {"hostvars": {"s1": {"slots": 4}}},
    }
    path = write(f"#!/bin/sh\ncat <<'END'\n{json.dumps(listing)}\nEND\n", "cloud")
    path.chmod(0o755)
    assert read_hosts(path, "nodes") == (
        Host(name="s1", user="u", slots=4),
        Host(name="s0", user="u"),
    )


def test_inventory_folder_merges_its_files(tmp_path):
    folder = tmp_path / "inventory"
    folder.mkdir()
    (folder / "01-a.yaml").write_text("nodes: {hosts: {h0: {ansible_ssh_private_key_file: k}}}")
    (folder / "02-b").write_text("[nodes]\nh1 slots=2\n")
    first, second = read_hosts(folder, "nodes")
    assert (first.name, first.identity) == ("h0", str(folder / "k"))
    assert second == Host(name="h1", slots=2)


VAULT = """
all:
  hosts:
    h0:
      ansible_become_password: !vault |
        $ANSIBLE_VAULT;1.1;AES256
        6162
      ansible_user: !unsafe "{{no template}}"
"""


def test_vaulted_value_of_unused_variable_is_ignored(write):
    assert read_hosts(write(VAULT.replace("{{no template}}", "me")), "all") == (
        Host(name="h0", user="me"),
    )


def test_vaulted_value_of_needed_variable_is_refused(write):
    text = VAULT.replace("ansible_become_password", "ansible_host")
    message, _ = refusal(write, text)
    assert message == ": host h0: ansible_host: the value is in a vault"


def test_encrypted_inventory_is_refused_with_vault_error_of_ansible(write):
    message, _ = refusal(write, "$ANSIBLE_VAULT;1.1;AES256\n613262\n626364\n")
    assert "ansible-inventory cannot read it" in message
    assert "vault secrets" in message


def test_invalid_ini_inventory_is_refused_with_error_of_ansible(write):
    message, _ = refusal(write, "[nodes]\nh0 slots=2\n[nodes:nonsense]\n", name="hosts")
    assert "ansible-inventory cannot read it" in message
    assert "nonsense" in message


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (INI, ":4", "it is in INI form"),
        ("all:\n  hosts:\n    gpu[01:16]:\n", ":3", "'gpu[01:16]' is a range of hosts"),
        (VAULT, ":5", "a value with a tag of Ansible's"),
        ("$ANSIBLE_VAULT;1.1;AES256\n6132\n", ":1", "it is encrypted"),
        ("# EC2\nplugin: amazon.aws.aws_ec2\n", ":2", "it configures an inventory plugin"),
        ("#!/bin/sh\nexit 1\n", "", "it is a program"),
        (b"\x7fELF\xff", "", "it is a program"),
        (None, "", "it is a folder"),
        ("a: {hosts: h0}", ":1", "`hosts` is text"),
        ("a:\n  children: {b: {hosts: {h0: }}}", ":2", "group a holds group b"),
        ("a: {hosts: {h0: }}\nb:\n  hosts: {h0: }", ":3", "h0 is in groups a and b"),
    ],
)
def test_without_ansible_error_names_line_and_feature_that_needs_ansible(
    write, tmp_path, monkeypatch, text, where, what
):
    monkeypatch.setattr(inventory.shutil, "which", lambda *_, **__: None)
    path = tmp_path if text is None else write(text)
    path.chmod(0o755)
    with pytest.raises(Unavailable) as error:
        read_hosts(path, "all")
    assert error.value.message == (
        f"{path}{where}: {what}: only Ansible can read such an inventory, and it is not installed"
    )
    assert error.value.hint == "pip install 'clusterkit[ansible]', or list every host in plain YAML"


def test_without_ansible_group_vars_beside_inventory_are_refused(write, tmp_path, monkeypatch):
    monkeypatch.setattr(inventory.shutil, "which", lambda *_, **__: None)
    (tmp_path / "group_vars").mkdir()
    with pytest.raises(Unavailable, match="there is a folder group_vars beside it"):
        read_hosts(write("all: {hosts: {h0: }}"), "all")


def test_ansible_inventory_timeout_is_reported_as_unavailable(write, monkeypatch):
    monkeypatch.setattr(inventory, "ANSIBLE_SECONDS", 0.1)
    with pytest.raises(Unavailable, match=r"ansible-inventory did not end within 0\.1 s") as error:
        read_hosts(write(INI, "hosts"), "all")
    assert "--list" in (error.value.hint or "")


def test_ansible_inventory_leaves_no_files_in_home(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    read_hosts(write(INI, "hosts"), "all")
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file()]


def test_plain_yaml_inventory_is_read_without_ansible(write, monkeypatch):
    monkeypatch.setattr(inventory.shutil, "which", lambda *_, **__: None)
    text = "# h0 ansible_host=10.0.0.1 is how INI would say it\nall: {hosts: {h0: }}\n"
    assert read_hosts(write(text), "all") == (Host(name="h0"),)


def test_inventory_text_with_executable_bit_is_read_as_text(write):
    for text in ("all: {hosts: {h0: }}", "h0 slots=1\n"):
        path = write(text)
        path.chmod(0o777)
        assert names(read_hosts(path, "all")) == ["h0"]


# ---------------------------------------------------------------- YAML, ugly


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "\ufeff", "---\n", "---\n...\n"])
def test_empty_inventory_is_refused(write, text):
    message, _ = refusal(write, text)
    assert message == ": the file is empty"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("all: {hosts: ", ":1: not YAML"),
        ("all:\n\thosts:\n", ":2: a tab where YAML needs spaces"),
        ("<html><body>404 Not Found</body></html>", ": not an inventory"),
        ("- h0\n- h1\n", ": not an inventory"),
        ("42 is the answer", ": not an inventory"),
        ("all: {hosts: [h0, h1]}", ":1: all.hosts: a mapping is needed"),
        ("all:\n  hosts:\n    h0: 10.0.0.1\n", ":3: all.hosts.h0: a host holds variables"),
        ("all:\n  host:\n    h0:\n", ":2: all.host: unknown key of a group"),
        ("h0: 10.0.0.1\n", ":1: h0: a group holds hosts, children and vars"),
        ("all: {hosts: {h0: , h0: }}", ":1: all.hosts.h0: is already set in line 1"),
        ("all: {vars: []}", ":1: all.vars: a mapping is needed"),
        (b"all: {hosts: {h\xff: }}", ": not a text file (byte 15 is not UTF-8)"),
        ("all: {hosts: {h0: {x: &a [*a]}}}", ": nested too deeply"),
    ],
)
def test_malformed_inventory_is_refused_with_line_and_key(write, text, said):
    message, _ = refusal(write, text)
    assert message.startswith(said), message


def test_missing_inventory_file_or_folder_is_refused(tmp_path):
    for path in (tmp_path / "gone.yaml", tmp_path / "gone" / "inventory.yaml"):
        with pytest.raises(BadInput, match=r"gone.*: no such file or directory") as error:
            read_hosts(path, "all")
        assert "hostfile" in (error.value.hint or "")


def test_unknown_group_is_refused_with_closest_name_in_hint(write):
    text = "all: {children: {trainers: {hosts: {h0: }}, cpus: {hosts: {h1: }}}}"
    message, hint = refusal(write, text, "trainer")
    assert message == ": there is no group 'trainer'"
    assert hint == "did you mean trainers? groups: all, cpus, trainers"


@pytest.mark.parametrize(
    ("text", "group", "said"),
    [
        ("all:\n", "all", ": no hosts"),
        ("all: {hosts: }", "all", ": no hosts"),
        ("all: {hosts: {h0: }}\nempty:\n", "empty", ": no hosts in group empty"),
    ],
)
def test_group_without_hosts_is_refused(write, text, group, said):
    assert refusal(write, text, group)[0] == said


def test_circular_groups_are_refused_with_error_of_ansible(write):
    message, _ = refusal(write, "a: {children: {b: }}\nb: {children: {a: }, hosts: {h0: }}")
    assert "ansible-inventory cannot read it" in message


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", ": the file is empty", "`host slots=N`"),
        ("# none yet\n", ": the file is empty", "`host slots=N`"),
        ("---\n", ": the file is empty", "`host slots=N`"),
        ("h0 slots=8\nh1:99999 slots=8\n", ":2: 'h1:99999': not a port", "1 to 65535"),
        ("h0 slots=8\nh1:ssh slots=8\n", ":2: 'h1:ssh': not a port", "1 to 65535"),
        ("h0\nh1\nh0\n", ":3: host h0 is listed twice, first in PATH:1", "keep one"),
        ("h0\nH0\n", ":2: hosts h0 and H0 have the same address h0", "two SSH ports"),
        ("h0\n-x\n", ":2: host '-x': '-x' is neither", "letters"),
        ("h0\na;b@h1\n", ":2: host h1: user 'a;b'", "quotes"),
        ("all:\n  hosts:\n    h0: {ansible_port: 0}\n",
         ":3: host h0: ansible_port: '0' is not a number", "ansible_port: 22"),
        ("g:\n  hosts:\n    h0:\n  vars:\n    slots: x\n",
         ":5: host h0: slots: 'x' is not a number", "slots: 8"),
        ("all:\n  vars:\n    ansible_port: ssh\n  hosts:\n    h0:\n",
         ":3: host h0: ansible_port: 'ssh' is not a number", "ansible_port: 22"),
        ("g:\n  hosts:\n    h0:\n    h1: {ansible_ssh_common_args: -J g:0}\n",
         ":4: host h1: jump g:0: 'g:0': not a port", "1 to 65535"),
        ("g:\n  hosts:\n    h0:\n    h1:\n      ansible_host: H0\n",
         ":4: hosts h0 and h1 have the same address h0", "two SSH ports"),
    ],
)  # fmt: skip
def test_unusable_host_is_refused_with_line_and_hint(write, text, message, hint):
    told, remedy = refusal(write, text)
    assert told.startswith(message.replace("PATH", str(write(text, "inventory.yaml"))))
    assert hint in remedy


def test_inventory_with_duplicate_address_is_refused(write):
    text = "all: {hosts: {h0: {ansible_host: 10.0.0.1}, h1: {ansible_host: 10.0.0.1}}}"
    message, hint = refusal(write, text)
    assert message == ":1: hosts h0 and h1 have the same address 10.0.0.1"
    assert "two SSH ports" in hint


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({"address": "a"}, {"address": "a", "port": 22}, True),
        ({"address": "a"}, {"address": "A"}, True),
        ({}, {"address": "h0"}, True),
        ({"address": "a", "port": 2201}, {"address": "a", "port": 2202}, False),
        ({"address": "a", "jump": "x"}, {"address": "a", "jump": "y"}, False),
    ],
)
def test_check_hosts_refuses_hosts_with_same_address_port_and_jump(first, second, same):
    hosts = [Host(name="h0", **first), Host(name="h1", **second)]
    if not same:
        assert check_hosts(hosts, "hosts") == tuple(hosts)
        return
    with pytest.raises(BadInput, match="h0 and h1 have the same address"):
        check_hosts(hosts, "hosts")


def test_check_hosts_refuses_duplicate_host_name():
    with pytest.raises(BadInput, match="host h0 is listed twice"):
        check_hosts([Host(name="h0"), Host(name="h0", address="b")], "hosts")


@pytest.mark.parametrize(
    "name",
    [
        *("h;reboot", "$(id)", "`id`", "a b", "-oProxyCommand=id", "h\n", "h/../x", "h'", 'h"'),
        *("h|id", "h&", "h>x", "*", "?", "h0:22", "naïve", ".", "h.", "user@h", "a\\b", "~"),
        "h\x00",
    ],
)
def test_check_hosts_refuses_invalid_host_names_and_addresses(name):
    for host in (Host(name=name), Host(name="h0", address=name)):
        with pytest.raises(BadInput, match="is neither a host name nor an address"):
            check_hosts([host], "hosts")


@pytest.mark.parametrize(
    "name", ["h0", "gpu-01.example.org", "10.0.0.1", "2001:db8::1", "::1", "fe80::1%eth0", "a_b"]
)
def test_check_hosts_accepts_valid_host_names_and_addresses(name):
    assert check_hosts([Host(name=name)], "hosts")[0].name == name


def test_host_ranges_are_expanded(write):
    ranges = ["n[1:3]", "m[:2]", "k[08:11]", "[a:c]", "s[0:10:5]-x", "r[1:2]n[1:2]", "o[5:5]:2222"]
    expected = "n1 n2 n3 m0 m1 m2 k08 k09 k10 k11 a b c s0-x s5-x s10-x r1n1 r1n2 r2n1 r2n2 o5"
    hosts = read_hosts(write(json.dumps({"nodes": {"hosts": dict.fromkeys(ranges)}})), "all")
    assert names(hosts) == expected.split()
    assert hosts[-1].port == 2222


@pytest.mark.parametrize("pattern", ["n[a:3]", "n[01:100]", "n[1:3", "n[]"])
def test_malformed_host_range_is_refused(write, pattern):
    message, _ = refusal(write, f'all:\n  hosts:\n    "{pattern}":\n')
    assert "ansible-inventory cannot read it" in message or "neither a host name" in message


@pytest.mark.parametrize(
    "pattern", ["n[1:99999999999]", "n[0:99999]m[0:99]", "n[0:200000:2]", "n[3:1]"]
)
def test_empty_or_oversized_host_range_is_refused_with_line(write, pattern):
    message, _ = refusal(write, f'all:\n  hosts:\n    "{pattern}":\n')
    said = "a range without hosts" if pattern == "n[3:1]" else "more than 100000 hosts"
    assert message == f":3: all.hosts.{pattern}: {said}"


def test_hosts_given_as_string_is_one_host_as_in_ansible(write, ansible):
    path = write("nodes: {hosts: h1, children: more}\nmore: {hosts: h2}\n")
    assert ansible(path, "--list")["more"]["hosts"] == ["h2"]
    assert names(read_hosts(path, "nodes")) == ["h1", "h2"]


def test_reading_inventory_of_5000_hosts_takes_linear_time(write):
    def seconds(racks):
        lines = ["all:", "  vars: {ansible_user: u}", "  children:"]
        for rack in range(racks):
            lines += [f"    rack{rack}:", f"      vars: {{slots: {rack % 8 + 1}}}"]
            lines += ["      hosts:"]
            lines += [f"        r{rack}n{node:02}: {{ansible_port: 22}}" for node in range(50)]
        path = write("\n".join(lines))
        began = time.process_time()
        hosts = read_hosts(path, "all")
        spent = time.process_time() - began
        assert len(hosts) == racks * 50
        assert hosts[-1] == Host(
            name=f"r{racks - 1}n49", port=22, user="u", slots=(racks - 1) % 8 + 1
        )
        return spent

    few, many = (min(seconds(racks) for _ in range(2)) for racks in (20, 100))
    assert many < 12 * few + 0.05


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


# ---------------------------------------------------------------- hostfiles


@pytest.fixture
def deepspeed():
    """DeepSpeed's own functions that read hostfiles, without the seconds its import takes."""
    found = importlib.util.find_spec("deepspeed")
    if found is None:
        pytest.skip("DeepSpeed is not installed: nothing to compare with")
    path = Path(found.submodule_search_locations[0]) / "launcher" / "runner.py"
    functions = [node for node in ast.parse(path.read_text()).body if hasattr(node, "returns")]
    names = {
        "collections": collections, "defaultdict": collections.defaultdict, "re": re,
        "deepcopy": copy.deepcopy, "Tuple": tuple, "List": list, "Dict": dict,
        "logger": logging.getLogger("deepspeed"), "EXPORT_ENVS": [], "UNSUPPORTED": [],
    }  # fmt: skip
    exec(compile(ast.Module(functions, []), str(path), "exec"), names)
    return names


HOSTFILE = "# DeepSpeed's form\r\n\r\n\tworker-0\tslots=8 # fast\r\nworker-1  slots = 4\r\n"


@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf"], ids=["", "bom"])
def test_hostfile_with_comments_tabs_bom_and_crlf_is_read(write, head):
    assert read_hosts(write(head + HOSTFILE.encode(), "hostfile"), "all") == (
        Host(name="worker-0", slots=8),
        Host(name="worker-1", slots=4),
    )


def test_hostfile_without_slots_is_read(write):
    assert read_hosts(write("10.0.0.1\n10.0.0.2 # second\n", "hostfile"), "all") == (
        Host(name="10.0.0.1"),
        Host(name="10.0.0.2"),
    )


def test_hostfile_ignores_max_slots_of_open_mpi(write):
    assert read_hosts(write("h0 slots=2 max_slots=4\n", "h"), "all") == (Host(name="h0", slots=2),)


@pytest.mark.parametrize(
    "user",
    [
        "-oProxyCommand=x",
        "a b",
        "a;reboot",
        "$(reboot)",
        "`reboot`",
        "a'b",
        'a"b',
        "a\tb",
        "a|b",
        "",
    ],
)
def test_check_hosts_refuses_invalid_user_names(user):
    with pytest.raises(BadInput, match=r"^hosts: host h0: user .* is not a valid user name"):
        check_hosts((Host(name="h0", user=user),), "hosts")


@pytest.mark.parametrize(
    "user", ["me", "me.too", "m-e_1", "me@corp.example", r"CORP\me", "j\u00fcrg"]
)
def test_check_hosts_accepts_directory_service_user_names(user):
    assert check_hosts((Host(name="h0", user=user),), "hosts")


SAME_HOSTFILES = [
    "w0 slots=4\nw1 slots=4\n",
    "w0 slots=4",
    "# c\nw0 slots=8\n\n  w1\tslots=4\n10.0.0.7 slots=16 # x\n",
    "w0 slots=4\r\nw1 slots=2\r\n",
    "\n\n\t\nw0 slots=4\n",
    "   # indented comment\nw0 slots=4\n",
    "w0 slots=4#close\n",
    "w0 slots=4 max_slots=8\n",
    "w0 slots=4 max-slots=8\n",
    "w0 slots=4 max_slots=8 # both\n",
    "w0 slots=4 gpu=a100\n",
    "w0 slots=4 ; half of it\n",
    "w0 slots=04\n",
    "w0 slots=00\nw1 slots=1\n",
    "w0 slots=1\nw1 slots=0\n",
    "w0 slots=0\n",
    "w0 slots=999999\n",
    "10.0.0.1 slots=1\n10.0.0.2 slots=1\n",
    "2001:db8::1 slots=2\n",
    "::1 slots=2\n",
    "w0.example.org slots=2\n",
    "w_0 slots=2\n",
    "W0 slots=2\n",
    "0 slots=2\n",
    "gpu-01 slots=2\ngpu-02 slots=3\ngpu-03 slots=1\n",
    "w1 slots=1\nw0 slots=1\n",
    "xn--bcher-kva.example slots=1\n",
]
BOTH_REFUSE = [
    "",
    "\n\n",
    "# nothing\n",
    "w0 slots=\n",
    "w0 slots=-1\n",
    "w0 slots=two\n",
    "w0 slots=+4\n",
    "w0 slot=4\n",
    "w0 slots 4\n",
    "w0 SLOTS=4\n",
    "w0 slots:4\n",
    "w0 gpus=4 slots=4\n",
    "slots=4 w0\n",
    "w0, slots=4\nw1\n",
    "w0 slots=1\nw0 slots=2\n",
    "w0 slots=1\nw0 slots=0\n",
    "w0 slots=4\nw1\n",
    "w0\nw1 slots=4\n",
    "w0 slots=4\nw1 slots=\n",
    "w0 slots=4\nw1 slot=4\n",
    "w0 w1 slots=4\n",
    "[nodes] w0 slots=4\n",
]
OURS_ONLY = {
    # Names alone, Open MPI's form with spaces.
    "w0\nw1\n": {"w0": None, "w1": None},
    "w0 slots = 4\n": {"w0": 4},
    "w0 slots= 4\n": {"w0": 4},
    "w0 slots =4\n": {"w0": 4},
}
DEEPSPEED_ONLY = [
    # Names that are none, two names of one machine, something attached to the number.
    "w;id slots=1\n",
    "-oProxyCommand=x slots=1\n",
    "w0- slots=1\n",
    "b\u00fccher slots=1\n",
    "w0 slots=4abc\n",
    "w0 slots=4,5\n",
    "w0 slots=\u0664\n",
    "w0 slots=9999999\n",
    "w0 slots=1\nW0 slots=1\n",
    "me@w0 slots=1\nw0 slots=1\n",
    "w0:0 slots=1\n",
    "w0:70000 slots=1\n",
]
# DeepSpeed takes these as names, which it hands to ssh or pdsh.
TAKEN_APART = {
    "me@w0 slots=2\n": Host(name="w0", user="me", slots=2),
    "me@corp.example@w0 slots=2\n": Host(name="w0", user="me@corp.example", slots=2),
    "w0:2222 slots=2\n": Host(name="w0", port=2222, slots=2),
    "me@w0:2222 slots=2\n": Host(name="w0", user="me", port=2222, slots=2),
    "[2001:db8::1] slots=2\n": Host(name="2001:db8::1", slots=2),
    "[2001:db8::1]:2222 slots=2\n": Host(name="2001:db8::1", port=2222, slots=2),
    "me@[2001:db8::1]:2222 slots=2\n": Host(name="2001:db8::1", user="me", port=2222, slots=2),
}


@pytest.mark.parametrize("text", SAME_HOSTFILES)
def test_hostfile_gives_same_slots_as_deepspeed(write, deepspeed, text):
    found = read_hosts(write(text, "hostfile"), "all")
    theirs = deepspeed["_parse_hostfile"](text.splitlines(keepends=True))
    assert [(host.name, host.slots) for host in found] == list(theirs.items())


@pytest.mark.parametrize("text", BOTH_REFUSE)
def test_hostfile_refused_by_deepspeed_is_refused(write, deepspeed, text):
    with pytest.raises(ValueError, match="Hostfile"):
        deepspeed["_parse_hostfile"](text.splitlines(keepends=True))
    assert refusal(write, text, name="hostfile")[0]


@pytest.mark.parametrize("text", OURS_ONLY)
def test_hostfile_in_open_mpi_form_is_read_though_deepspeed_refuses(write, deepspeed, text):
    with pytest.raises(ValueError, match="bad entry"):
        deepspeed["_parse_hostfile"](text.splitlines(keepends=True))
    found = read_hosts(write(text, "hostfile"), "all")
    assert {host.name: host.slots for host in found} == OURS_ONLY[text]


@pytest.mark.parametrize("text", DEEPSPEED_ONLY)
def test_hostfile_taken_by_deepspeed_but_unusable_is_refused(write, deepspeed, text):
    assert deepspeed["_parse_hostfile"](text.splitlines(keepends=True))
    assert refusal(write, text, name="hostfile")[0]


@pytest.mark.parametrize("text", TAKEN_APART)
def test_hostfile_entry_is_split_into_user_address_and_port(write, deepspeed, text):
    assert list(deepspeed["_parse_hostfile"]([text]).values()) == [2]
    assert read_hosts(write(text, "hostfile"), "all") == (TAKEN_APART[text],)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h0 slots=2\nh1 slot=2\n", ":2: 'h1 slot=2' is not `host slots=N`"),
        ("h0 slots=2\nh1\nh2 slots=2\n", ":2: 'h1' is not `host slots=N`"),
        ("h0 slots=-1\n", ":1: slots=-1: not a number of ranks"),
        ("h0 slots=two\n", ":1: slots=two: not a number of ranks"),
        ("h0 slots=²\n", ":1: slots=²: not a number of ranks"),
        ("h0 slots=99999999999999999999\n", ":1: slots=99999999999999999999: not a number"),
        ("h0 slots=\n", ":1: 'h0 slots=' is not `host slots=N`"),
        ("h0 slots=1\nh0 slots=2\n", ":2: host h0 is listed twice"),
        ("h0 slots=1\n\nh;id slots=2\n", ":3: host 'h;id': 'h;id' is neither a host name"),
        ("h0:22\nh1:0\n", ":2: 'h1:0': not a port"),
    ],
)
def test_invalid_hostfile_is_refused_with_line_number(write, text, said):
    message, _ = refusal(write, text, name="hostfile")
    assert message.startswith(said), message


def test_hostfile_with_group_is_refused(write):
    message, hint = refusal(write, "h0 slots=1\n", "nodes", name="hostfile")
    assert message == ": a hostfile has no group 'nodes'"
    assert "leave `group` out" in hint


@pytest.mark.parametrize(
    "text",
    [
        "h0\nh1\n[nodes]\nh0\nh1\n",
        "h0 slots=2 ansible_host=10.0.0.1\nh1 slots=2\n",
        "h0 ansible_host=10.0.0.1 slots=2\nh1 slots=2\n",
        "h0 clusterkit_address=10.0.0.1 slots=2\nh1\n",
        "h0 rack=3\nh1 rack=4\n",
    ],
)
def test_ini_inventory_resembling_hostfile_keeps_hosts_and_variables(write, text):
    hosts = read_hosts(write(text, "hosts"), "all")
    assert names(hosts) == ["h0", "h1"]
    assert (hosts[0].slots == 2) == ("slots=2" in text)
    assert (hosts[0].address == "10.0.0.1") == ("ansible_host" in text)
    assert (hosts[0].cluster_address == "10.0.0.1") == ("clusterkit_address" in text)


# ---------------------------------------------------------------- include, exclude

HOSTS = (
    Host(name="h0", slots=4),
    Host(name="h1", slots=4, devices=(2, 3, 6, 7)),
    Host(name="h2"),
)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (None, None, {"h0": None, "h1": (2, 3, 6, 7), "h2": None}),
        ("", "", {"h0": None, "h1": (2, 3, 6, 7), "h2": None}),
        ("h2@h0", None, {"h0": None, "h2": None}),
        ("h0:1,3@h2:5", None, {"h0": (1, 3), "h2": (5,)}),
        (" h0:3,1,3 @ h1:7 ", None, {"h0": (1, 3), "h1": (7,)}),
        (None, "h0@h2", {"h1": (2, 3, 6, 7)}),
        (None, "h0:0,2@h1:6", {"h0": (1, 3), "h1": (2, 3, 7), "h2": None}),
        (None, "h0:0,1,2,3", {"h1": (2, 3, 6, 7), "h2": None}),
    ],
)
def test_include_and_exclude_choose_hosts_and_gpus(include, exclude, expected):
    found = choose_hosts(HOSTS, include, exclude)
    assert {host.name: host.devices for host in found} == expected
    for host in found:
        if host.devices is not None and (include or exclude):
            assert host.slots == len(host.devices)


@pytest.mark.parametrize(
    ("include", "exclude", "said", "hint"),
    [
        ("h0", "h1", "include and exclude: only one of the two", ""),
        ("h9", None, "include h9: host 'h9' is unknown", "known: h0, h1, h2"),
        (None, "worker0", "exclude worker0: host 'worker0' is unknown", "known: h0, h1, h2"),
        ("h0@", None, "include h0@: host '' is unknown", "known"),
        ("h0:", None, "include h0:: '' is not a list of GPUs", "h0:0,1"),
        ("h0:a", None, "include h0:a: 'a' is not a list of GPUs", "h0:0,1"),
        ("h0:0-3", None, "include h0:0-3: '0-3' is not a list of GPUs", "h0:0,1"),
        ("h0:²", None, "include h0:²: '²' is not a list of GPUs", "h0:0,1"),
        ("h0:-1", None, "include h0:-1: '-1' is not a list of GPUs", "h0:0,1"),
        ("h0:4", None, "include h0:4: h0 has 4 slots, no number 4", "its numbers: 0, 1, 2, 3"),
        ("h1:0,3", None, "include h1:0,3: h1 has 4 slots, no number 0", "2, 3, 6, 7"),
        (None, "h1:4", "exclude h1:4: h1 has 4 slots, no number 4", "2, 3, 6, 7"),
        (None, "h2:0", "exclude: the number of GPUs of h2 is not known", "include"),
        (None, "h0@h1@h2", "exclude h0@h1@h2: no host is left", ""),
    ],
)
def test_invalid_include_or_exclude_is_refused(include, exclude, said, hint):
    with pytest.raises(BadInput) as error:
        choose_hosts(HOSTS, include, exclude)
    assert error.value.message.startswith(said)
    assert hint in (error.value.hint or "")


POOL = {"w0": 4, "w1": 2, "w2": 1, "w3": 0}
FILTERS = [
    "", "w0", "w1", "w0@w1", "w1@w0", "w0@w0", "w0:0", "w0:3", "w0:0,1", "w0:1,0", "w0:0,0,2",
    "w0:0,2@w1", "w1:1@w0:3", "w0:1@w0:2", "w0:1@w0:2@w0:1", "w0@w0:2", "w0:2@w0", "w0:0@w1:0@w0:3",
    "w0:0,1,2,3", "w0:0,1,2,3@w1:0,1@w2:0", "w0@w1@w2", "w0@w3", "w2:0", "w2@w2:0", "w0: 1",
    "w0:1 , 2", "w0: 0,3@w1: 1", "w0:01", "w1@w2@w0:1", "w0:3@w1@w0:0",
]  # fmt: skip
BAD_FILTERS = [
    "w9", "w0@w9", "w0:4", "w1:0,2", "w0:-1", "w0:", "w0:a", "w0:0-3", "w0:1,", "w0:,1", "w0:1,,2",
    "w0:1:2", "@", "w0@", "@w0", "w0@@w1", "w3:0", ":0", "w0,w1", "w0;w1", "[w0]", "me@w0",
    "w0:2222", "w0:0.5", "w0:0x1", "W0", "*", "w*", "w[0-1]", "w0 w1", "all", "w0:*",
]  # fmt: skip


def both(deepspeed, text, flag):
    """What DeepSpeed and what clusterkit make of a filter: GPUs by host, in order."""
    pool = {name: list(range(slots)) for name, slots in POOL.items()}
    theirs = lambda: deepspeed["parse_resource_filter"](pool, **{f"{flag}_str": text})  # noqa: E731
    hosts = [Host(name=name, slots=slots) for name, slots in POOL.items()]
    ours = lambda: choose_hosts(hosts, **({"include": None, "exclude": None} | {flag: text}))  # noqa: E731
    return theirs, ours


@pytest.mark.parametrize("flag", ["include", "exclude"])
@pytest.mark.parametrize("text", FILTERS)
def test_include_and_exclude_choose_same_gpus_as_deepspeed(deepspeed, text, flag):
    theirs, ours = both(deepspeed, text, flag)
    # Without a filter DeepSpeed keeps hosts without slots, and starts nothing there.
    expected = [(name, slots) for name, slots in theirs().items() if slots]
    if not expected:
        with pytest.raises(BadInput, match="no host is left"):
            ours()
        return
    found = ours()
    devices = [(host.name, list(host.devices or range(host.slots))) for host in found]
    assert devices == expected


@pytest.mark.parametrize("flag", ["include", "exclude"])
@pytest.mark.parametrize("text", BAD_FILTERS)
def test_include_or_exclude_refused_by_deepspeed_is_refused(deepspeed, text, flag):
    theirs, ours = both(deepspeed, text, flag)
    with pytest.raises(ValueError):  # noqa: PT011 (int() has words of its own)
        theirs()
    with pytest.raises(BadInput, match=f"^{flag} "):
        ours()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[2001:db8::1]", {"2001:db8::1": None}),
        ("2001:db8::1", {"2001:db8::1": None}),
        ("[2001:db8::1]:0,2@w0", {"2001:db8::1": (0, 2), "w0": None}),
        (" w0 ", {"w0": None}),
    ],
)
def test_include_takes_ipv6_hosts_and_surrounding_spaces(text, expected):
    hosts = (Host(name="2001:db8::1", slots=4), Host(name="w0", slots=4))
    found = choose_hosts(hosts, text, None)
    assert {host.name: host.devices for host in found} == expected


def test_choose_hosts_refuses_hosts_that_all_have_zero_slots():
    with pytest.raises(BadInput, match="every host has slots=0"):
        choose_hosts((Host(name="w0", slots=0),), None, None)
