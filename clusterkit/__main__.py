"""The ``clusterkit`` command, also as ``python -m clusterkit``."""

import os
import signal


def main() -> None:
    """Run the command line. Ctrl-C while it is imported ends it with 130, without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from clusterkit import cli

    cli.main(imported=lambda: signal.signal(signal.SIGINT, before))


if __name__ == "__main__":
    main()
