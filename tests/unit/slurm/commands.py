"""Slurm's commands, made up."""

from clusterkit.transport import Completed, LocalTransport


class Slurm(LocalTransport):
    """A login node whose Slurm prints what it is told to; files are this machine's."""

    def __init__(self, **printed: str) -> None:
        self.printed = printed
        self.asked: list[tuple[str, ...]] = []

    def run(self, host, argv, **options):
        self.asked.append(tuple(argv))
        text = self.printed.get(argv[0], "")
        if text.startswith("error"):
            return Completed(tuple(argv), 1, "", text)
        return Completed(tuple(argv), 0, text, "")


RUN_DIR = "/home/u/runs/demo-1"


def job(state="RUNNING", number=7, reason="None", start="N/A", folder=RUN_DIR):
    return f"{number}|{state}|{start}|{reason}|{folder}\n"
