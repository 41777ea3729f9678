"""Slurm: the batch script, and what happens when a job ends (`job/slurm_allocation.py` reads its variables)."""
