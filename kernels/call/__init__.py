"""Checks of a whole call: shapes, features, and what lies on the device."""
