"""Inventories, as Ansible itself reads them."""

import json
import os
import random
import subprocess
import sys

import pytest

from clusterkit.backends.ssh import inventory
from clusterkit.backends.ssh.inventory import read_hosts
from clusterkit.backends.ssh.variables import host_of
from clusterkit.cluster import Host
from clusterkit.errors import BadInput, Unavailable
from tests.unit.inventory.reading import names, refusal


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
