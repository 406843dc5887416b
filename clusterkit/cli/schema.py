"""clusterkit schema"""

from __future__ import annotations

from clusterkit import api
from clusterkit.cli.common import print_json, verb


@verb("schema", "clusterkit schema > job.schema.json")
def command() -> None:
    """Print the JSON schema of job files, for editors.

    Editors check a job file as you type if its first line is
    `# yaml-language-server: $schema=job.schema.json`.
    """
    print_json(api.schema())
