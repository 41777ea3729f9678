"""Slurm: the batch script, and the end of a job (`job/slurm_allocation.py` reads its variables)."""
