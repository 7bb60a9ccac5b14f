"""`python -m tilewise` is the command `tilewise`."""

import sys

from tilewise.cli import main

sys.exit(main())
