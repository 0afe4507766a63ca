"""Tracking libraries keep their files in a folder of the tests, and report nothing to anyone."""

from __future__ import annotations

import os
import tempfile

# Before the libraries are imported, which is when they read these.
_HOME = tempfile.mkdtemp(prefix="hacrl-trackers-")
for _name in ("TRACKIO_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
    os.environ[_name] = os.path.join(_HOME, _name.lower())
os.environ["WANDB_ERROR_REPORTING"] = "false"
os.environ["WANDB_SILENT"] = "true"
