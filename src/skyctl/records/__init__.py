"""Frozen, strict records: the only thing the stages of skyctl hand to each other."""
