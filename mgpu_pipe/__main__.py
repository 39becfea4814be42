"""``python -m mgpu_pipe`` is the program ``mgpu-pipe``."""

import sys

from mgpu_pipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
