"""Saved steps of a training run: their format, and how they are found, read and written. No torch.

A layer of its own, below all that uses steps: resuming, lazy loading, promoting and the command line.
"""
