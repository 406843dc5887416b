"""Does the host answer at all, and soon enough?"""

from __future__ import annotations

from collections.abc import Iterator

from clusterkit.doctor.base import Verdict, fail, is_about_host_key, ok, skip, warn
from clusterkit.doctor.check import Answers, Check

SLOW = 8.0
"""Seconds until a host begins to answer; a look-up that fails takes 10."""
_NO_LOOKUPS = (
    "echo 'UseDNS no' | sudo tee /etc/ssh/sshd_config.d/dns.conf && sudo systemctl reload ssh"
)


def judge(answers: Answers) -> Iterator[Verdict]:
    for host, answer in answers.of.items():
        error = answer.error
        if error is None:
            spent = answer.received - answer.sent
            if answer.began is not None and answer.ended is not None:
                spent -= answer.ended - answer.began
            if spent <= SLOW:
                yield ok(host)
            else:
                mend = _NO_LOOKUPS if answers.subject.over_ssh else None
                yield warn(host, f"took more than {SLOW:g} s to answer", mend)
        elif is_about_host_key(error.message):
            yield skip(host, "its host key was not accepted")
        else:
            stuck = "did not end" in error.message
            look = f"does a mount hang? ssh {host} cat /proc/mounts" if stuck else None
            yield fail(host, error.message, error.hint or look)


CHECK = Check("reachable", "The host answers, within seconds.", judge, silent_too=True)
