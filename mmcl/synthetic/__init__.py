"""Synthetic data with known answers."""
