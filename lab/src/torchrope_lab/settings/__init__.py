"""Settings of the commands: dataclasses, and one parser. Does not import torch."""
