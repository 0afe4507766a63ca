"""Metrics outside the run directory: each library in the file of its name, all of them fed by `RunTrackers`."""

from hacrl.trackers.run_trackers import RunTrackers, missing_libraries
from hacrl.trackers.tracker import Tracker

__all__ = ["RunTrackers", "Tracker", "missing_libraries"]
