"""Strategies compared: rows, tables, pictures, the report. Pure, but for the SVG files."""
