"""Is the rendezvous port free on the head, and if not, who has it?"""

from __future__ import annotations

from clusterkit.doctor.base import Answers, Check, Finding, Subject, read
from clusterkit.doctor.scripts import PORT, PortSeen

NAME = "port"


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    seen, findings = read(NAME, PORT, answers, subject, PortSeen)
    for host, port in seen.items():
        if port.error is None:
            findings.append(Finding(NAME, host, "ok", f"{subject.port} is free"))
            continue
        if not port.taken:
            cause = f"port {subject.port} cannot be used: {port.error}"
            findings.append(Finding(NAME, host, "fail", cause, "port: auto"))
            continue
        if port.holders:
            who = ", ".join(f"{h.command} (process {h.pid} of {h.user})" for h in port.holders)
            remedy = " ".join(["kill", *(str(holder.pid) for holder in port.holders)])
        else:
            who = "a process that only root can see"
            remedy = f"sudo ss -ltnp 'sport = :{subject.port}'"
        cause = f"port {subject.port} is in use by {who}"
        findings.append(Finding(NAME, host, "fail", cause, f"{remedy}, or `port: auto`"))
    return findings


CHECK = Check(NAME, "The rendezvous port is free on the head.", judge, (PORT,))
