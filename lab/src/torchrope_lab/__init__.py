"""The laboratory: trains models with each encoding, measures them and reports the results."""
