"""Agents, at torch's import path."""
