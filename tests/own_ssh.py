"""An SSH configuration of a test's own: ssh takes the home of the user database, not HOME."""

import os
import shutil
from pathlib import Path

import pytest


def configure(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``ssh``, and what asks it, read this configuration alone while the test runs."""
    (folder / "ssh_config").write_text(text)
    (program := folder / "bin" / "ssh").parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("clusterkit.backends.ssh.config.CONFIG_SECONDS", 1e-6)
