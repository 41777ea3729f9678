"""Benchmarks, side by side with torch's own launcher: `python -m bench [--quick] [row …]`."""
