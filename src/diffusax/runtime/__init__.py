"""Devices, random numbers and compiled programs: what runs networks, and knows none of them.

`devices` finds and arranges devices, `programs` makes and keeps what is compiled for them, and
`random` draws noise.
"""
