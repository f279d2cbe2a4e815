"""Runs a plan to images."""
