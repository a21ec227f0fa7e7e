"""Named passes over traced modules, one file each."""
