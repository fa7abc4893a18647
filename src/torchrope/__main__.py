"""Run the command line interface:  python -m torchrope, and  python -m torchrope verify  without the laboratory."""

import sys

if sys.argv[1:2] == ["verify"]:
    from torchrope.verify import main as verify

    sys.exit(verify(sys.argv[2:]))

from torchrope.lab.cli import main

sys.exit(main())
