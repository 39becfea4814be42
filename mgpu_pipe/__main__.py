"""``python -m mgpu_pipe`` is the program ``mgpu-pipe``."""

from mgpu_pipe.cli import program

if __name__ == "__main__":
    program()
