"""Does the host answer at all, and soon enough?"""

from __future__ import annotations

from clusterkit.doctor.base import (
    Answer,
    Answers,
    Check,
    Finding,
    Subject,
    is_about_host_key,
)

NAME = "reachable"
SLOW = 8.0
"""Seconds until a host begins to answer; a look-up that fails takes 10."""
_NO_LOOKUPS = (
    "echo 'UseDNS no' | sudo tee /etc/ssh/sshd_config.d/dns.conf && sudo systemctl reload ssh"
)


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    return [_one(host, answer, subject) for host, answer in answers.items()]


def _one(host: str, answer: Answer, subject: Subject) -> Finding:
    error = answer.error
    if error is None:
        spent = answer.received - answer.sent
        if answer.began is not None and answer.ended is not None:
            spent -= answer.ended - answer.began
        if spent <= SLOW:
            return Finding(NAME, host, "ok")
        return Finding(
            NAME,
            host,
            "warn",
            f"took more than {SLOW:g} s to answer",
            _NO_LOOKUPS if subject.over_ssh else None,
        )
    if is_about_host_key(error.message):
        return Finding(NAME, host, "skip", "its host key was not accepted")
    stuck = (
        f"does a mount hang? ssh {host} cat /proc/mounts"
        if "did not end" in error.message
        else None
    )
    return Finding(NAME, host, "fail", error.message, error.hint or stuck)


CHECK = Check(NAME, "The host answers, within seconds.", judge, silent_too=True)
