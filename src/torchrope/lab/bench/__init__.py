"""How fast: parity first, then time and memory beside the reference and others' code, in one process."""
