"""`python -m hpctrain` is the console script `hpctrain`."""

import sys

from hpctrain.cli import main

sys.exit(main())
