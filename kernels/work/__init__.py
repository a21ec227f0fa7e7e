"""Which block computes what: tiles of sequences, lists of tiles, split keys, fragments in and out, launches."""
