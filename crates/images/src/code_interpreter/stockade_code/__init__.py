"""Runs code in Jupyter kernels and streams what it does, over HTTP on port 49999 of the guest.

The protocol is the one E2B's code interpreter clients speak: see `server`. Kernels are spoken to by
`jupyter_client`; each context is one kernel, and runs one piece of code at a time (`contexts`).
"""
