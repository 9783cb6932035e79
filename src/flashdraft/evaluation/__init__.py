"""Measuring drafters: tasks, timed runs, summaries of them, the arithmetic of speculation, reports."""
