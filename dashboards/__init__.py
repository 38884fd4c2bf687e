"""Renders the results store as a static site."""
