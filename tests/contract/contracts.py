"""What tests of the contract share."""

from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
TOKEN = "hunter2-Zq81-correct-horse"
