"""``python -m mgpu_pipe.strategies.build_extension``: compiles DeepSpeed's file access where torch keeps extensions.

Run by the launcher, in a process of its own, before workers start (:mod:`mgpu_pipe.launch.extensions`).
"""

from __future__ import annotations


def main() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder().load(verbose=False)


if __name__ == "__main__":
    main()
