"""Parts of the gfx942 kernel."""
