"""Run the command line interface:  python -m torchrope_lab."""

import sys

from torchrope_lab.cli import main

sys.exit(main())
