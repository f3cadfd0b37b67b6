"""python -m trivet: the command line."""

import sys

from trivet.cli import main

sys.exit(main())
