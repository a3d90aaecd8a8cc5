"""`python -m mstar.worker`: one rank, told by its environment what it is."""

import os
import sys

from mstar.worker.main import main

status = main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)  # daemon threads may sit in a read or a collective; nothing is left to clean up
