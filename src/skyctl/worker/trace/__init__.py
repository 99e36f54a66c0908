"""What a rank records of its run, on a clock that others can be compared with."""
