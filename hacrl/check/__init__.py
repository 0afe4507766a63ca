"""What `hacrl check` tells before a run: `check_run` finds it out, `report` shows it. No weights are loaded."""
