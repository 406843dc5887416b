"""Checks of hosts: what each host is asked, and judgements of the answers of all."""
