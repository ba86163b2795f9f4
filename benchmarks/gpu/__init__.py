"""Policies on a GPU: batches beside a plain loop of torch, and clients beside the CPU."""
