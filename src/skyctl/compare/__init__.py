"""Predicted beside measured: statistics, rows, tables, plots. Pure, but for the plots' files."""
