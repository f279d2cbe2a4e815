"""Devices, meshes of them, their memory, and the processes that share them.

Begin with `mesh`, which says where every array lies. `lowering` chooses the form of an operation
that suits a platform.
"""
