"""Measure, check in the same run, and write a record; never draw. One file per subject."""
