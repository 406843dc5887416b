"""Malformed inventories, host ranges and duplicate hosts."""

import json
import time

import pytest

from clusterkit.backends.ssh.inventory import read_hosts
from clusterkit.cluster import Host
from clusterkit.errors import BadInput
from clusterkit.hosts.addresses import check_hosts
from tests.unit.inventory.reading import names, refusal


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
