"""What ``scripts/gpu_check.py`` runs: every part of the GPU executor on a real device, checked and measured."""
