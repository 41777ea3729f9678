"""Turning a request into a running job: what this machine offers, and how a job is started on it."""
