"""Print what a rank is told, as one line of JSON: its numbers, its arguments, its variables.

The variables are those that the arguments name, and all of accelerate's. Launchers that have names
of their own for a rank's numbers, or an argument (--local_rank), are understood. It needs no torch.
"""

import json
import os
import sys


def number(*names: str, otherwise: int) -> int:
    return int(next((os.environ[name] for name in names if name in os.environ), otherwise))


words = sys.argv[1:]
names = {word for word in words if word.isidentifier()}
names |= {name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))}
told = {
    "rank": number("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", otherwise=0),
    "local_rank": number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", otherwise=0),
    "world_size": number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS", otherwise=1),
    "meets": "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ,
    "argv": words,
    "env": {name: os.environ.get(name) for name in sorted(names)},
}
# In one write: ranks may share a pipe.
sys.stdout.write(json.dumps(told) + "\n")
