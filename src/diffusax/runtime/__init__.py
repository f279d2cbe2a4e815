"""Devices, random numbers and compilation."""
