"""Speed of rotations: parity with float64, then time beside the reference and other packages."""
