"""Training and measuring one model: the Lightning module, checkpoints, evaluation, cost."""
