"""Data for a draft, and its training. Nothing in here is needed to decode."""
