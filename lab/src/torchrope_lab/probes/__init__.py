"""Probes: what an encoding lets one layer of attention gather, measured on tasks whose optimum is known."""
