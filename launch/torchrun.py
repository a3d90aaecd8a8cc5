"""torchrun's entry: `torchrun --nproc-per-node=N launch/torchrun.py CONFIG.yaml`. See mstar.supervise.torchrun.py."""

import os
import sys

from mstar.supervise.torchrun import main

status = main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)  # daemon threads may sit in a read or a collective
