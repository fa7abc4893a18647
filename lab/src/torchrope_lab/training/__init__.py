"""Training and measuring one model: configuration, the Lightning module, checkpoints, evaluation, cost."""
