"""Devices, the build cache, and launching; importing it loads no compiler, tensor library or driver."""

from fly.runtime.exported import Launchable, export_metadata, load
from fly.runtime.prepared import Prepared, bind

__all__ = ["Launchable", "Prepared", "bind", "export_metadata", "load"]
