"""A timing model of CDNA3 and CDNA4: recorded instructions of a launch are replayed on one compute unit."""
