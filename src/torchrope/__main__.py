"""Run the command line interface:  python -m torchrope."""

import sys

from torchrope.lab.cli import main

sys.exit(main())
