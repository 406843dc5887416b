"""The command line: one module per verb, imported when the verb is used.

Results go to stdout, notes and progress to stderr. Exit codes: 0 done, 1 the answer is no, 124 a
time limit, 125 clusterkit refused or failed, 130 interrupted or cancelled; verbs that follow a run
exit with the run's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import click

import clusterkit
from clusterkit.cli import unwritable
from clusterkit.errors import (
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    EXIT_UNREAD,
    BadInput,
    ClusterkitError,
    did_you_mean,
)

GROUPS = {
    "Start": {
        "init": "Write a first job file and cluster file for a script.",
        "submit": "Start a job and follow it.",
        "plan": "Print exactly what submit would do.",
        "export": "Write a job as a batch script or a manifest.",
        "convert": "Write a job file from another tool's command or manifest.",
    },
    "Runs": {
        "ls": "List runs, newest first.",
        "status": "Show the state of runs and of their nodes, and why they failed.",
        "logs": "Show the log lines of all nodes and ranks, in order of time.",
        "metrics": "Show loss, tokens/s and other reported numbers, step by step.",
        "top": "Watch runs in the terminal: ranks, curves, rounds, logs.",
        "web": "Show runs live in a browser, or as one HTML file.",
        "attach": "Follow a run to its end; start its supervisor if that is gone.",
        "wait": "Wait until runs have ended.",
        "rerun": "Start the job of a run again.",
        "cancel": "End runs and everything they started.",
        "rm": "Remove the folders of runs that have ended.",
    },
    "Inside a run": {
        "exec": "Run a command beside the ranks of a run.",
        "shell": "Open a shell beside the ranks of a run.",
        "stack": "Show where each rank is: its line of code and collective.",
        "forward": "Make a port of a node one of this machine, until Ctrl-C.",
        "cp": "Copy a file from a node of a run, or to it.",
    },
    "Cluster": {
        "doctor": "Check hosts, GPUs, network and software before a run.",
        "bench": "Measure bandwidth and latency between nodes; find the slow link.",
        "estimate": "Estimate memory per GPU for every way to divide a model.",
        "clusters": "List the clusters of the cluster file, and which can be reached.",
    },
    "Other": {
        "jobs": "List job files and what each needs, or copy one here.",
        "schema": "Print the JSON schema of job files, for editors.",
        "completion": "Print the completion script for a shell.",
    },
}
"""Verb to a line of help, by group. Each verb is `command` in the module of its name."""

VERBS = {verb: line for group in GROUPS.values() for verb, line in group.items()}

_RENAMED = {
    "ls-jobs": "jobs",
    "examples": "jobs --examples, jobs --copy NAME",
    "notify": "doctor --notify",
    "plot": "metrics RUN... --plot FILE.png",
}
"""Verbs of the release before, and what to type instead."""


class _Verbs(click.Group):
    """A group that imports a verb's module only to run it or to show its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = import_module(f"clusterkit.cli.{name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in _RENAMED:
            raise BadInput(f"{args[0]} has a new name", f"clusterkit {_RENAMED[args[0]]}")
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            suggestion = did_you_mean(args[0], VERBS).capitalize()
            ctx.fail(f"No such command {args[0]!r}. {suggestion}".rstrip())
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, verbs in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(f"{verb:10}", line) for verb, line in verbs.items()])


@click.group(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: clusterkit submit jobs/zero3.yaml --nodes 2",
)
@click.version_option(clusterkit.__version__, prog_name="clusterkit")
@click.option("--debug", is_flag=True, help="Show the traceback of an error; after a verb, too.")
def cli(debug: bool) -> None:
    """Run PyTorch training jobs on one machine or on many, from one job file."""


def _print_error(message: str, hint: str | None, as_json: bool) -> None:
    """Print an error for people on stderr, and with ``--json`` as an object on stdout as well."""
    from clusterkit.ui.formatting import prose, terminal_filter

    clean = terminal_filter(sys.stderr)
    # click's own setting for NO_COLOR ended with its context.
    colour = False if os.environ.get("NO_COLOR") else None
    click.secho("error: ", fg="red", bold=True, nl=False, err=True, color=colour)
    click.echo(prose(f"error: {clean(message)}").removeprefix("error: "), err=True)
    if hint:
        click.echo(prose(f" hint: {clean(hint)}"), err=True)
    if as_json:
        from clusterkit.cli.common import print_json

        try:
            print_json({"error": {"message": message, "hint": hint}})
        except OSError:  # the exit code says it
            _discard_output()


def main(argv: list[str] | None = None, imported: Callable[[], Any] | None = None) -> None:
    """Run the ``clusterkit`` command and end the process with its exit code.

    Args:
        imported: called when the verb's module has been imported.
    """
    _open_standard_files()
    with unwritable.tolerated("stderr"):
        code = _run(argv, imported)
    sys.exit(code)


def _run(argv: list[str] | None, imported: Callable[[], Any] | None) -> int:
    """Return the exit code of a command line."""
    arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug, as_json = "--debug" in own, "--json" in own
    arguments = [word for word in own if word != "--debug"] + arguments[len(own) :]
    extra: dict[str, Any] = {"color": False} if os.environ.get("NO_COLOR") else {}
    try:
        code = cli.main(arguments, prog_name="clusterkit", standalone_mode=False, obj=imported,
                        **extra)  # fmt: skip
    except ClusterkitError as error:
        if debug:
            raise
        _print_error(error.message, error.hint, as_json)
        code = error.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "clusterkit"
        _print_error(error.format_message(), f"{path} --help", as_json)
        code = EXIT_REFUSED
    except click.ClickException as error:
        _print_error(error.format_message(), None, as_json)
        code = EXIT_REFUSED
    except (click.Abort, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    except SystemExit as error:
        # Where the reader of a pipe has closed it, as `head` does, click exits with 1, and only
        # there.
        if error.code != 1:
            raise
        _discard_output()
        code = EXIT_UNREAD
    except OSError as error:
        code = _report_os_error(error, as_json)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        code = EXIT_UNREAD
    except OSError as error:
        code = _report_os_error(error, False)
    return code if isinstance(code, int) else 0


def _open_standard_files() -> None:
    """Open what the caller has closed of files 0 to 2: else the run's own files would take their
    place, and get what is printed."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _report_os_error(error: OSError, as_json: bool) -> int:
    if error.filename is None:  # of standard output
        _discard_output()
    what = error.filename or "standard output"
    _print_error(f"{error.strerror or error}: {what}", None, as_json)
    return EXIT_REFUSED


def _discard_output() -> None:
    """Write nothing more to standard output, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
