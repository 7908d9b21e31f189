"""Before torch is imported: its threads must not spin while they wait for each other."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
