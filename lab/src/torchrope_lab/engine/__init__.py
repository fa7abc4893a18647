"""How runs are run, shared and resumed, what is measured of them, and what studies have in common."""
