"""Starts, watches and restarts the front and the ranks."""

from mstar.supervise.supervisor import serve

__all__ = ["serve"]
