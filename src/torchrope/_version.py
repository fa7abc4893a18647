"""The version, which setuptools reads without importing torch."""

__version__ = "0.3.0"
