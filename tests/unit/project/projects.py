"""Projects that are sent, and their copies on hosts."""

import os
import stat
import subprocess
import sys
from pathlib import Path

from clusterkit.plan import Tree
from clusterkit.sync.upload import Upload
from clusterkit.transport import LocalTransport

LOCAL = LocalTransport()
BAD_NAME = os.fsdecode(b"latin-\xe9")


def git(folder, *words):
    done = subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "protocol.file.allow=always",
         "-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false", *words],
        cwd=folder, capture_output=True, text=True,
        env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(path, data=b"", mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    path.chmod(mode)
    return path


def paths(found):
    return [entry.path for entry in found.entries]


def tree_of(tmp_path, found, name=None):
    path = tmp_path / "host" / "projects" / "p" / (name or found.digest[:16])
    return Tree(str(found.root), str(path), found.digest, "")


def deliver(tmp_path, found, name=None, **more):
    """Send a snapshot to this machine; gives the number of files sent, and the folder."""
    tree = tree_of(tmp_path, found, name)
    return Upload(found, tree).send("h0", sys.executable, LOCAL, **more), Path(tree.path)


def contents(root):
    """Every file and link below a folder, with what tells them apart."""
    found = {}
    for folder, below, files in os.walk(root):
        for name in [*files, *below]:
            path = Path(folder, name)
            if path.is_symlink():
                found[str(path.relative_to(root))] = ("->", os.readlink(path))
            elif path.is_file():
                mode = stat.S_IMODE(path.stat().st_mode)
                found[str(path.relative_to(root))] = (mode, path.read_bytes())
    return found


def expected(found):
    wanted = {}
    for entry in found.entries:
        if entry.target is not None:
            wanted[entry.path] = ("->", entry.target)
        else:
            wanted[entry.path] = (entry.mode, (found.root / entry.path).read_bytes())
    return wanted


def leftovers(tmp_path):
    """What lies beside the trees that is no tree, no record and no `current`."""
    return [path.name for path in (tmp_path / "host/projects/p").glob(".*") if path.name != ".lock"]
