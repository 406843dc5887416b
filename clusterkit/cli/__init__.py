"""The command line: one module per verb, imported when the verb is used.

Results go to stdout, notes and progress to stderr. Exit codes: 0 done, 1 failed, 2 bad input, 3 a
tool or service is missing, 130 interrupted or cancelled; `submit` exits with the run's own.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import click

import clusterkit
from clusterkit.errors import EXIT_FAILURE, EXIT_INTERRUPTED, ClusterkitError, did_you_mean

VERBS = {
    "init": "Write a first job file and cluster file for a script.",
    "examples": "List the job files that come with clusterkit, or copy one here.",
    "submit": "Start a job and follow it.",
    "plan": "Print exactly what submit would do.",
    "convert": "Write a job file from another tool's command or manifest.",
    "estimate": "Estimate memory per GPU for every way to divide a model.",
    "ls-jobs": "List the job files of this project and what each needs.",
    "ls": "List runs, newest first.",
    "status": "Show the state of a run and of its nodes, and why it failed.",
    "logs": "Show the log lines of all nodes and ranks, in order of time.",
    "metrics": "Show loss, tokens/s and other reported numbers, step by step.",
    "attach": "Follow a run to its end; start its supervisor if that is gone.",
    "top": "Watch runs in the terminal: ranks, curves, rounds, logs.",
    "web": "Show runs live in a browser, or as one HTML file.",
    "cancel": "End a run and everything it started.",
    "plot": "Draw loss and tokens/s over the steps, of one or several runs.",
    "doctor": "Check hosts, GPUs, network and software before a run.",
    "bench": "Measure bandwidth and latency between nodes; find the slow link.",
    "notify": "Send a test notification as a cluster's entry says.",
    "rm": "Remove the folders of runs that have ended.",
    "schema": "Print the JSON schema of job files, for editors.",
    "completion": "Print the completion script for a shell.",
}
"""Verb to a line of help. Each verb is `command` in the module of its name, `-` as `_`."""


class _Verbs(click.Group):
    """A group that imports a verb's module only to run it or to show its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = import_module(f"clusterkit.cli.{name.replace('-', '_')}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            suggestion = did_you_mean(args[0], VERBS).capitalize()
            ctx.fail(f"No such command {args[0]!r}. {suggestion}".rstrip())
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: clusterkit submit jobs/zero3.yaml --nodes 2",
)
@click.version_option(clusterkit.__version__, prog_name="clusterkit")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Run PyTorch training jobs on one machine or on many, from one job file."""


def _print_error(message: str, hint: str | None = None) -> None:
    from clusterkit.ui.formatting import terminal_filter

    clean = terminal_filter(sys.stderr)
    # click's own setting for NO_COLOR ended with its context.
    colour = False if os.environ.get("NO_COLOR") else None
    click.secho("error: ", fg="red", bold=True, nl=False, err=True, color=colour)
    click.echo(clean(message), err=True)
    if hint:
        click.echo(f" hint: {clean(hint)}", err=True)


def main(argv: list[str] | None = None) -> None:
    """Run the ``clusterkit`` command and end the process with its exit code."""
    arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    extra: dict[str, Any] = {"color": False} if os.environ.get("NO_COLOR") else {}
    try:
        code = cli.main(arguments, prog_name="clusterkit", standalone_mode=False, **extra)
    except ClusterkitError as error:
        if "--debug" in arguments[:1]:
            raise
        _print_error(error.message, error.hint)
        code = error.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "clusterkit"
        _print_error(error.format_message(), f"{path} --help")
        code = error.exit_code
    except click.ClickException as error:
        _print_error(error.format_message())
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has closed it, as `head` does: write nothing more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        _print_error(f"{error.strerror or error}: {error.filename or 'the output'}")
        code = EXIT_FAILURE
    sys.exit(code if isinstance(code, int) else 0)
