"""The version of this package, as pyproject.toml has it."""

from importlib.metadata import version

__version__ = version("pccl-train")
