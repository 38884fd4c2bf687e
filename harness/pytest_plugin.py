"""Bring-up stages as pytest tests."""
