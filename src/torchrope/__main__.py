"""`python -m torchrope verify`: check the GPU kernels on this machine; `golden`: write golden vectors."""

import sys
from importlib import import_module

COMMANDS = ("verify", "golden")

if sys.argv[1:2] not in [[command] for command in COMMANDS]:
    sys.exit(
        "usage: python -m torchrope {verify,golden} [options]; the command `torchrope` (compare, train, study and "
        "others) is in the distribution torchrope-lab: pip install . ./lab in a clone"
    )

sys.exit(import_module(f"torchrope.{sys.argv[1]}").main(sys.argv[2:]))
