"""Commands without the laboratory: `python -m torchrope verify` and `golden`."""

import sys
from importlib import import_module

COMMANDS = ("verify", "golden")
USAGE = """\
usage: python -m torchrope COMMAND [options]

commands:
  verify   compare the Triton kernels with float64 on this GPU, and use the correct ones from then on
  golden   write golden vectors, to test a rotation in another language

The command `torchrope` (compare, train, study and others) is in the distribution torchrope-lab, in a clone:
pip install . ./lab
"""

if sys.argv[1:2] not in [[command] for command in COMMANDS]:
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(USAGE, end="")
        sys.exit()
    sys.exit(USAGE)

sys.exit(import_module(f"torchrope.{sys.argv[1]}").main(sys.argv[2:]))
