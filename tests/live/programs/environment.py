"""Print what a rank sees, as one line of JSON.

It needs no torch, but names it: the fork server imports that ahead, as for most programs.
"""

import json
import os
import sys

print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}))
