"""Studies, one module each: train and evaluate models and write typed results as JSON. No plotting."""
