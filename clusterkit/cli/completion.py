"""clusterkit completion"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from clusterkit.cli.common import verb


@verb("completion", 'eval "$(clusterkit completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    It completes verbs, options, run ids and cluster names.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    # Not source(), for which bash would be started to ask its version.
    completer = kind(ctx.find_root().command, {}, "clusterkit", "_CLUSTERKIT_COMPLETE")
    click.echo(completer.source_template % completer.source_vars())
