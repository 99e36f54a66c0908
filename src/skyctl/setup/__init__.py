"""Environments on nodes that lack torch: looked for, made, removed. ``setup/node/`` runs there."""
