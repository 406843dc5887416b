"""``python -m tests.lab``: a lab from a shell. ``make lab HOSTS=4`` is ``up 4``."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from pathlib import Path

from clusterkit.errors import BadInput, ClusterkitError, pluralize
from tests.lab import MOST_HOSTS, Lab, faults, labs, remove_by_name


def main(argv: list[str] | None = None) -> int:
    """Carry out a command line; gives its exit code."""
    options = _parser().parse_args(argv)
    try:
        options.run(options)
    except ClusterkitError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab",
        description="A lab of real SSH hosts on this machine, made of namespaces. Needs root.",
        epilog="Exit codes: 0 done, 1 failed, 2 bad input, 3 this machine cannot have a lab.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, text: str, run: object, **more: object) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text, **more)  # type: ignore[arg-type]
        added.add_argument(
            "--dir", default=".lab", metavar="DIR", help="the lab's folder (default: .lab)"
        )
        added.set_defaults(run=run)
        return added

    up = verb("up", "make a lab", _up)
    up.add_argument("hosts", type=int, metavar="N", help=f"how many hosts, 1 to {MOST_HOSTS}")
    up.add_argument("--shared", action="store_true", help="one folder, /srv/shared, for all hosts")
    down = verb("down", "remove a lab, and all that is in its folder", _down)
    down.add_argument(
        "--name", metavar="NAME", help="a lab whose folder is lost, as `status` names it"
    )
    verb("status", "the hosts of a lab, and what is wrong with each", _status)
    fault = verb(
        "fault",
        "break something of a host, or mend it",
        _fault,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="faults:\n"
        + "\n".join(
            f"  {f'{name} HOST {fault.value or str()}':24s} {fault.what}"
            for name, fault in faults.FAULTS.items()
        ),
    )
    fault.add_argument("name", metavar="NAME", help="one of those below")
    fault.add_argument("host", metavar="HOST", help="h0, h1, ...")
    fault.add_argument("value", metavar="VALUE", nargs="?", help="for faults that take one")
    return parser


def _up(options: argparse.Namespace) -> None:
    lab = Lab(options.dir, options.hosts, shared=options.shared)
    start = time.monotonic()
    if lab.up():
        took = f"{time.monotonic() - start:.1f} s"
        ends = dict.fromkeys((lab.hosts[0].address, lab.hosts[-1].address))
        print(f"{pluralize(len(lab.hosts), 'host')}, {' to '.join(ends)}, {took}")
    else:
        print(f"{lab.dir}: the lab is up already")
    print(f"  ssh -F {shlex.quote(str(lab.ssh_config))} h0")
    print(f"  inventory: {lab.inventory}")


def _down(options: argparse.Namespace) -> None:
    if options.name is not None:
        print(f"{options.name}, once in {remove_by_name(options.name)}: removed")
        return
    lab = Lab(options.dir)
    print(f"{lab.dir}: {'removed' if lab.down() else 'there is no lab'}")


def _status(options: argparse.Namespace) -> None:
    lab = Lab.open(options.dir) if Path(options.dir, "state.json").exists() else None
    if lab is not None:
        print(f"{lab.dir}: {lab.name}, {lab.network}")
        for host in lab.hosts:
            wrong = faults.present(lab, host.name)
            print(f"  {host.name:4s} {host.address:15s} {', '.join(wrong) or 'well'}")
    for name, folder in labs().items():
        if lab is None or name != lab.name:
            lost = "" if (folder / "state.json").exists() else " (its folder is lost)"
            print(f"another lab: {name} in {folder}{lost}")
    if lab is None:
        raise BadInput(f"{options.dir}: there is no lab", hint="python -m tests.lab up 2")


def _fault(options: argparse.Namespace) -> None:
    Lab.open(options.dir).fault(options.name, options.host, options.value)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `status | head` is no error
    sys.exit(main())
