"""clusterkit schema"""

from __future__ import annotations

import click

from clusterkit import api
from clusterkit.cli.common import print_json


@click.command("schema", epilog="Example: clusterkit schema > job.schema.json")
def command() -> None:
    """Print the JSON schema of job files, for editors.

    A first line `# yaml-language-server: $schema=job.schema.json` in a job file makes editors
    check it as you type.
    """
    print_json(api.schema())
