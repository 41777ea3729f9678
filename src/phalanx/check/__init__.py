"""Checks of a machine before it joins a job: alone (local), and in pairs with the other nodes (meeting)."""
