"""The record that a rank makes of its run, on a clock that others can be compared with."""
