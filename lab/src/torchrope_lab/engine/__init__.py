"""Shared code of the studies: settings, cached training runs, typed results."""
