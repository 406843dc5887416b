"""Print what a rank sees, as one line of JSON; needs no torch."""

import json
import os
import sys

print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}))
