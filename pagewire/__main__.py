"""`python -m pagewire`: the `pagewire` command."""

import sys

from pagewire.cli import main

sys.exit(main())
