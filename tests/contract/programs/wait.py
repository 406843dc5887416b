"""Says through one named pipe that it is there, and ends when the other one is closed."""

import os

with open(os.environ["READY"], "w") as ready:
    ready.write("here\n")
with open(os.environ["GO"]) as go:
    go.read()
