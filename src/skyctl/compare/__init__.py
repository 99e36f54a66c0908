"""Strategies compared: rows, tables, pictures, the report. Pure, but for the PNG files."""
