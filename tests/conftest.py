"""Before torch is imported: its threads must not spin long while they wait for each other."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
