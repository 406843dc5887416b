"""Is the key that proves who a host is known, and the same as ever?"""

from __future__ import annotations

from collections.abc import Iterator

from clusterkit.doctor.base import Verdict, fail, is_about_host_key, ok, skip
from clusterkit.doctor.check import Answers, Check, without_ssh


def judge(answers: Answers) -> Iterator[Verdict]:
    for host, answer in answers.of.items():
        error = answer.error
        if error is None:
            yield ok(host, "known")
        elif is_about_host_key(error.message):
            yield fail(host, error.message, error.hint)
        else:
            yield skip(host, "it did not answer")


CHECK = Check(
    "host-key",
    "The key that proves who the host is stands in known_hosts and has not changed.",
    judge,
    silent_too=True,
    pointless=without_ssh,
)
