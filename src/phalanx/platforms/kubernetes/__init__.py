"""Kubernetes: what a pod says about a job, and the manifests that such jobs are made from.

`pod` and `manifest` are pure: variables and the text of /etc/hosts in, settings or documents out.
"""
