"""Hostfiles, `--include` and `--exclude`, as DeepSpeed reads them."""

import ast
import collections
import copy
import importlib.util
import logging
import re
from pathlib import Path

import pytest

from clusterkit.backends.ssh.hosts import choose_hosts
from clusterkit.backends.ssh.inventory import read_hosts
from clusterkit.cluster import Host
from clusterkit.errors import BadInput
from clusterkit.hosts.addresses import check_hosts
from tests.unit.inventory.reading import names, refusal

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
