"""The version, which setuptools reads without importing torch."""

__version__ = "0.2.0"
