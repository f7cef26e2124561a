"""Rows of the README's tables, a module for each kind of results file."""
