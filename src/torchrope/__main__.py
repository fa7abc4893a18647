"""The command without the laboratory: `python -m torchrope verify`."""

import sys

USAGE = """\
usage: python -m torchrope verify [options]

Compare the Triton kernels with float64 on this GPU, and use the correct ones from then on.

The command `torchrope` (compare, train, study and others) is in the distribution torchrope-lab, in a clone:
pip install . ./lab
"""

if sys.argv[1:2] == ["verify"]:
    from torchrope.verify import main

    sys.exit(main(sys.argv[2:]))
if sys.argv[1:] not in (["-h"], ["--help"]):
    sys.exit(USAGE)
print(USAGE, end="")
