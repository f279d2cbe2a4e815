"""Devices, meshes of them, their memory, and the processes that share them."""
