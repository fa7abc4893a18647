"""Benchmarks of rotations: parity with float64, then time and memory beside the reference and other packages."""
