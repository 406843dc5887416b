"""Inventories as clusterkit and Ansible read them."""

import pytest

from clusterkit.backends.ssh.inventory import read_hosts
from clusterkit.errors import BadInput


def names(hosts):
    return [host.name for host in hosts]


def refusal(write, text, group="all", name="inventory.yaml"):
    path = write(text, name)
    with pytest.raises(BadInput) as error:
        read_hosts(path, group)
    assert error.value.message.startswith(str(path))
    return error.value.message.removeprefix(str(path)), error.value.hint or ""
