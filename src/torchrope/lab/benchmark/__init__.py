"""The benchmark: every encoding on several data sets by one plan, entries of others beside it, and ranks over all."""
