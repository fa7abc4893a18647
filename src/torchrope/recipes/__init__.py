"""Recipes: YAML, one experiment a file, in the words of `torchrope compare` and `torchrope train`."""
