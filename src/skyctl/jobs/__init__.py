"""The jobs that commands do with a cluster: probe, compare, try, set up, clean, report."""
