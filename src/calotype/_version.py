"""The version, on its own so that packaging can read it without torch."""

__version__ = "0.1.0"
