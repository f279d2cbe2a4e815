"""Devices, memory, random numbers and compilation."""
