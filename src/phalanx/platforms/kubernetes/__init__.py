"""Kubernetes: the manifests that jobs are made from (`job/kubernetes_pod.py` reads what a pod knows)."""
