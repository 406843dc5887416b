"""Is the key that proves who a host is known, and the same as ever?"""

from __future__ import annotations

from clusterkit.doctor.base import Answers, Check, Finding, Subject, is_about_host_key

NAME = "host-key"


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    findings = []
    for host, answer in answers.items():
        error = answer.error
        if error is None:
            findings.append(Finding(NAME, host, "ok", "known"))
        elif is_about_host_key(error.message):
            findings.append(Finding(NAME, host, "fail", error.message, error.hint))
        else:
            findings.append(Finding(NAME, host, "skip", "it did not answer"))
    return findings


CHECK = Check(
    NAME,
    "The key that proves who the host is stands in known_hosts and has not changed.",
    judge,
    silent_too=True,
    pointless=lambda subject: None if subject.over_ssh else "not reached over SSH",
)
