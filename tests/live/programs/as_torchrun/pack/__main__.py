"""A package that is run by ``-m``, with arguments that a launcher may take for its own."""

import inspect
import os
import sys

from .sub import where

if __name__ == "__main__":
    print(__name__, __package__, __spec__.name, os.path.basename(__file__), sys.argv[1:])
    print(sys.path[0] == os.getcwd(), where(), len(inspect.stack()))
    sys.exit(0 if os.environ["RANK"] == "0" else None)
