"""What studies share: settings, runs that are trained once, typed results."""
