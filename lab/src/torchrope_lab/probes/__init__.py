"""Probes: which attention weights an encoding makes possible in one layer, on tasks whose optimum is known."""
