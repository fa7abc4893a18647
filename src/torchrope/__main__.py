"""`python -m torchrope`."""

import sys

from torchrope.cli import main

sys.exit(main())
