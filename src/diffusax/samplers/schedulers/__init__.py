"""Samplers under the names, and with the options, of diffusers' schedulers."""
