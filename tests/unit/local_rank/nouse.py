import os
import sys

print("ARGS", sys.argv[1:], "RANK", os.environ["RANK"])
