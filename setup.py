"""Packages of the wheel; all else is in pyproject.toml. ``mgpu_pipe.conf`` is the folder ``conf`` (package-dir)."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["mgpu_pipe", "mgpu_pipe.*"]), "mgpu_pipe.conf"])
