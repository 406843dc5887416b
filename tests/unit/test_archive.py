"""The agent as one file: what is in it, and that any Python runs it."""

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from importlib import resources

import pytest

from clusterkit.agent import archive


def entries():
    with zipfile.ZipFile(io.BytesIO(archive.build())) as opened:
        return {entry.filename: (entry, opened.read(entry)) for entry in opened.infolist()}


def test_archive_holds_whole_agent_with_reproducible_metadata():
    found = entries()
    assert list(found) == sorted(found)
    for entry, _ in found.values():
        assert entry.date_time == (1980, 1, 1, 0, 0, 0)
        assert entry.compress_type == zipfile.ZIP_STORED
        assert (entry.create_system, entry.external_attr >> 16) == (3, 0o644)
    sources = {
        f"clusterkit/agent/{each.name}": each.read_bytes()
        for each in resources.files("clusterkit.agent").iterdir()
        if each.name.endswith(".py") and each.name not in ("__init__.py", "archive.py")
    }
    assert len(sources) > 10
    assert {name: content for name, (_, content) in found.items() if name in sources} == sources
    assert found.keys() - sources == {
        "__main__.py", "clusterkit/__init__.py", "clusterkit/agent/__init__.py",
    }  # fmt: skip


def test_archive_bytes_are_same_in_every_process():
    ask = (
        "import hashlib; from clusterkit.agent import archive; "
        "print(hashlib.sha256(archive.build()).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"},
    )  # fmt: skip
    assert done.stdout.strip() == hashlib.sha256(archive.build()).hexdigest()


@pytest.mark.parametrize("way", ["file", "standard input"])
def test_any_python_runs_archive_without_installed_packages(tmp_path, way):
    """`-S`: not even the packages that are installed."""
    node = tmp_path / "node-0"
    path = tmp_path / "agent.pyz"
    path.write_bytes(archive.build())
    given = str(path) if way == "file" else "-"
    for flags in (["-I"], ["-I", "-S"]):
        subprocess.run(
            [sys.executable, *flags, given, "run", "--nproc", "1", "--workdir", "/", "--",
             "sh", "-c", "exit 0"],
            input=archive.as_text() if way != "file" else b"", check=True, cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "CLUSTERKIT_NODE_DIR": str(node)},
        )  # fmt: skip
        assert json.loads((node / "exit.json").read_bytes())["exit_code"] == 0
    assert sorted(os.listdir(tmp_path)) == ["agent.pyz", "node-0"]


def test_archive_imports_its_modules_from_archive(tmp_path):
    path = tmp_path / "agent.pyz"
    path.write_bytes(archive.build())
    ask = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "from clusterkit.agent import node; print(node.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", ask, path], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"{path}/clusterkit/agent/node.py"
