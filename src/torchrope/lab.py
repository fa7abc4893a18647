"""The former place of the laboratory."""

raise ImportError("torchrope.lab is torchrope_lab, of the distribution torchrope-lab: pip install . ./lab in a clone")
