"""Slurm: what an allocation says about a job, the batch script, and what happens when a job ends.

`host_list` and `allocation` are pure and read variables only: `scontrol` is missing in containers.
"""
