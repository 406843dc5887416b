"""clusterkit completion"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion", epilog='Example: eval "$(clusterkit completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    Verbs, options, run ids and cluster names complete.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    # BashComplete.source() would start bash to ask its version; the text alone is wanted.
    completer = kind(ctx.find_root().command, {}, "clusterkit", "_CLUSTERKIT_COMPLETE")
    click.echo(completer.source_template % completer.source_vars())
