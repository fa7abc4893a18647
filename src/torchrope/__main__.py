"""`python -m torchrope verify`: check the GPU kernels on this machine."""

import sys

if sys.argv[1:2] != ["verify"]:
    sys.exit(
        "usage: python -m torchrope verify [options]; the command `torchrope` (compare, train, study and others) is in "
        "the distribution torchrope-lab: pip install . ./lab in a clone"
    )

from torchrope.verify import main

sys.exit(main(sys.argv[2:]))
