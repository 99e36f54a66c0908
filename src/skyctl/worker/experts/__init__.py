"""Experts on other machines: the process that holds them, and the ranks that use them."""
